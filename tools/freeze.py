"""Renew the frozen settings that ship for builds of the micro-world: `python -m tools.freeze`,
after a prompt, a lint check or a rule of redaction has changed on purpose. The files stay as they
are where nothing has changed.
"""

import tempfile
from pathlib import Path

from memcalib.commands.build import load_build
from memcalib.products.dataset.build import Build
from memcalib.products.dataset.pilot import (
    check_frozen,
    freeze_without_pilot,
    read_frozen,
    write_frozen,
)
from memcalib.products.dataset.pipeline import MemoryPipeline, Pipeline

SHIPPED = Path(__file__).parents[1] / "memcalib" / "products" / "dataset" / "frozen"


def renew(pipeline: Pipeline) -> None:
    """Write the frozen file of a pipeline anew where its settings differ, and print each
    difference.
    """
    settings = pipeline.settings()
    frozen = read_frozen(pipeline.frozen_name)
    changes = check_frozen(settings, frozen.settings)
    for change in changes:
        print(f"{pipeline.frozen_name}: {change}")
    if changes:
        file = SHIPPED / f"{pipeline.frozen_name}.json"
        write_frozen(file, freeze_without_pilot(settings, frozen.reason))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        renew(Pipeline(load_build("micro"), folder))
        renew(MemoryPipeline(Build(micro=1, memory={"log": "micro"}, seed=4), folder))
