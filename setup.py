"""Package metadata read from settings.ini, the one place where it is written."""

import shutil
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHIPPED_KINDS = [
    "csv",
    "j2",
    "jinja",
    "js",
    "json",
    "jsonl",
    "md",
    "safetensors",
    "sh",
    "smk",
    "yaml",
]  # of files beside the code
config = ConfigParser(delimiters=["="])
with (ROOT / "settings.ini").open(encoding="utf-8") as settings:
    config.read_file(settings)
cfg = config["DEFAULT"]
extras = {
    name: cfg[f"{name}_requirements"].split()
    for name in ("data", "train", "build", "notebook", "plan", "inspect", "vllm", "spacy")
}
extras["dev"] = [
    *cfg["dev_requirements"].split(),
    *(need for name in extras if name not in ("vllm", "spacy") for need in extras[name]),
]


class BuildWithNotebooks(build_py):
    """The experiment notebooks travel as data of the package, so that `memcalib reproduce` finds
    them from a wheel.
    """

    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "memcalib" / "products" / "reproduction" / "experiments"
            target.mkdir(parents=True, exist_ok=True)
            for notebook in sorted((ROOT / "nbs" / "experiments").glob("e[0-9][0-9]_*.ipynb")):
                shutil.copy(notebook, target)


setup(
    cmdclass={"build_py": BuildWithNotebooks},
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license="Apache-2.0",
    keywords=cfg["keywords"],
    packages=find_packages(include=["memcalib", "memcalib.*"]),
    package_data={
        "memcalib": ["py.typed", *(f"**/*.{kind}" for kind in SHIPPED_KINDS)],
    },
    include_package_data=True,
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    entry_points={
        "console_scripts": [cfg["console_scripts"]],
        "inspect_ai": ["memcalib = memcalib.evaluation.inspect_task"],
        # under the name of its module: `pytest -p` with that name then loads it once
        "pytest11": [
            "memcalib.products.integrations.pytest_plugin"
            " = memcalib.products.integrations.pytest_plugin"
        ],
        "nbdev": ["memcalib = memcalib._modidx:d"],
    },
    zip_safe=False,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)
