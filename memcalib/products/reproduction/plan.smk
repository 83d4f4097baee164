# Runs the jobs that plan.json lists, a rule for each kind; `memcalib reproduce` writes that file and starts this one in its folder.
# Each job is done when its record is there. What is done already is not in the file, so nothing here looks at the times of files.
import json
import re
import sys
from pathlib import Path

with open("plan.json", encoding="utf-8") as file:
    JOBS = {job["name"]: job for job in json.load(file)["jobs"]}
RUN = "import sys; from memcalib.products.reproduction.jobs import job_main; sys.exit(job_main(sys.argv[1:]))"


def minutes(wildcards):
    """The time that a queue is asked for: three times the forecast, an hour at least."""
    job = JOBS[wildcards.job]
    hours = job["hours"] / max(1, job["nodes"] * job["gpus"])
    return max(60, round(180 * hours))


rule all:
    input:
        [f"{name}/job.json" for name in JOBS],


for kind in dict.fromkeys(job["kind"] for job in JOBS.values()):

    rule:
        name:
            re.sub(r"\W", "_", kind)
        input:
            lambda wildcards: [f"{name}/job.json" for name in JOBS[wildcards.job]["reads"] if name in JOBS],
        output:
            "{job}/job.json",
        wildcard_constraints:
            job="|".join(re.escape(name) for name, job in JOBS.items() if job["kind"] == kind),
        threads: 1
        priority: 1
        resources:
            gpu=lambda wildcards: JOBS[wildcards.job]["gpus"],
            nodes=lambda wildcards: JOBS[wildcards.job]["nodes"],
            runtime=minutes,
        params:
            python=sys.executable,
            run=RUN,
        shell:
            "{params.python:q} -P -c {params.run:q} . {wildcards.job:q}"
