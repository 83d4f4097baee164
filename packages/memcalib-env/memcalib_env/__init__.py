"""The taskset `memcalib-env` of verifiers: records with known levels, judged for how memory was used."""

from memcalib.products.integrations.verifiers import taskset_class

MemcalibTaskset = taskset_class()
__all__ = ["MemcalibTaskset"]
