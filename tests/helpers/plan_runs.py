"""Runs the jobs of a plan one after the other in this process, in the place of the engine."""

from memcalib.io.records import ForeseenError
from memcalib.io.tasks import TasksFailed
from memcalib.products.reproduction.jobs import Jobs, alone, run_job
from memcalib.products.reproduction.quickstart import call_here


def run_jobs_here(jobs: Jobs, targets=(), processes=2, say=print, advice="", ran=None) -> list[str]:
    """The jobs that ran, in order; raises as the engine does."""
    errors = {}
    with alone(
        jobs.root, "plan", "another command is working in this folder; wait until it has finished"
    ):
        names = jobs.to_do(targets)
        if not names:
            return []
        jobs.write(names)
        for name in names:
            failed = [other for other in jobs[name].reads if other in errors]
            if failed:
                errors[name] = f"needs {failed[0]}, which does not exist"
                continue
            if ran is not None:
                ran.append(name)
            try:
                run_job(jobs.root, name, call_here)
            except ForeseenError as error:
                errors[name] = str(error)
    if errors:
        raise TasksFailed(errors, advice)
    return names
