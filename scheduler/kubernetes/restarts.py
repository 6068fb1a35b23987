"""Whether the controller of a pod restarts it after an eviction: Jobs, JobSets, Volcano, MPI and one-shot kinds."""

from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

from foundation.kubernetes.api import Object
from scheduler.kubernetes.api import CachedReads, UndecidedError

_ONE_SHOT: Final = (
    ("argoproj.io", "Workflow"), ("tekton.dev", "TaskRun"), ("sparkoperator.k8s.io", "SparkApplication"),
    ("kubevirt.io", "VirtualMachineInstance"), ("actions.github.com", "EphemeralRunner"),
    ("actions.summerwind.dev", "Runner"), ("flyte.lyft.com", "flyteworkflow"),
)  # fmt: skip
_HEADS: Final = (("ray.io/node-type", "head", "Ray"), ("dask.org/component", "scheduler", "Dask"))
_ENDS: Final = ("AbortJob", "TerminateJob", "CompleteJob")  # actions of a Volcano policy
_ON_EVICTION: Final = {"PodEvicted", "PodFailed", "*"}  # an evicted pod fails before it is removed
_RETRIES: Final = 6  # of a Job that states no backoffLimit
_REPLICATED_JOB: Final = "jobset.sigs.k8s.io/replicatedjob-name"
_INDEX_FAILURES: Final = "batch.kubernetes.io/job-index-failure-count"
_BY_SIGNAL: Final = (137, 143)  # exit codes of a program that an eviction ends


class RestartCheck:
    """Decides about pods, by their controllers as read up to 30 s ago."""

    def __init__(self, reads: CachedReads) -> None:
        self._reads = reads

    def permanent_failure(self, pod: Object, owner: Object) -> str | None:
        """Return why an eviction would end the work of a pod for good: to its owner it is a failure like any other."""
        group, kind, name = str(owner.get("apiVersion")).partition("/")[0], owner.get("kind"), owner["name"]
        labels, mpi = pod["metadata"].get("labels") or {}, (group, kind) == ("kubeflow.org", "MPIJob")
        never = group == "kubeflow.org" and not mpi and (pod.get("spec") or {}).get("restartPolicy") == "Never"
        if (group, kind) in _ONE_SHOT or never:
            return f"{kind} {name} treats an eviction as a failure, and may not restart it"
        cluster = next((tool for key, value, tool in _HEADS if labels.get(key) == value), None)
        if cluster is not None and labels.get("ray.io/originated-from-crd") != "RayService":
            return f"it is the head of {cluster} cluster {name}, whose jobs end with it"
        try:
            if (group, kind) == ("batch.volcano.sh", "Job"):
                job = self._reads.object(_path(pod, "batch.volcano.sh/v1alpha1", "jobs", name), "jobs.batch.volcano.sh")
                return _fails_volcano(job, labels.get("volcano.sh/task-spec"))
            if mpi:  # mpirun in the launcher fails with any of its workers
                name = f"{name}-launcher"
            elif (group, kind) != ("batch", "Job"):
                return None
            job = self._reads.object(_path(pod, "batch/v1", "jobs", name), "jobs")
            controllers = [ref for ref in job["metadata"].get("ownerReferences") or () if ref.get("controller")]
            if any(ref.get("kind") == "AppWrapper" for ref in controllers):  # it starts its Jobs again
                return None
            failed = _fails(job, (pod["metadata"].get("annotations") or {}).get(_INDEX_FAILURES))
            if failed is None:
                return None
            reason, why = failed
            for ref in (ref for ref in controllers if ref["kind"] == "JobSet"):
                jobset = self._reads.object(_path(pod, "jobset.x-k8s.io/v1alpha2", "jobsets", ref["name"]), "jobsets")
                if _restarts(jobset, (job["metadata"].get("labels") or {}).get(_REPLICATED_JOB), reason):
                    return None
                why = f"{why}, and JobSet {ref['name']} would not restart it"
        except UndecidedError as undecided:
            return f"cannot determine whether {kind} {name} would restart it: {undecided}"
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            return f"cannot determine whether {kind} {name} would restart it: {error!r}"
        return f"Job {name} would fail permanently: {why}"


def _path(pod: Object, group: str, resource: str, name: str) -> str:
    namespace = quote(pod["metadata"].get("namespace") or "default", safe="")
    return f"/apis/{group}/namespaces/{namespace}/{resource}/{quote(name, safe='')}"


def _fails(job: Object, index_failures: object) -> tuple[str, str] | None:
    """Return as what and why a Job fails by one more evicted pod; None: it starts another."""
    spec, status = job["spec"], job.get("status") or {}
    decided = _action_on_eviction((spec.get("podFailurePolicy") or {}).get("rules") or ())
    if decided == "Ignore":
        return None
    if decided in ("FailJob", "FailIndex"):
        reason = "PodFailurePolicy" if decided == "FailJob" else "FailedIndexes"
        return reason, f"its podFailurePolicy has {decided} for an eviction"
    reason, limit, failures = "BackoffLimitExceeded", spec.get("backoffLimit", _RETRIES), status.get("failed") or 0
    if spec.get("backoffLimitPerIndex") is not None:
        reason, limit, failures = "FailedIndexes", spec["backoffLimitPerIndex"], index_failures or 0
    return None if int(limit) > int(failures) else (reason, "an eviction counts as a failure, and no retry is left")


def _restarts(jobset: Object, part: str | None, reason: str) -> bool:
    """Whether a JobSet restarts after one of its Jobs failed; the first rule that matches decides.

    A rule on the message of the failure, which is not known, counts where it would fail the JobSet.
    """
    policy, status = (jobset.get("spec") or {}).get("failurePolicy") or {}, jobset.get("status") or {}
    for rule in policy.get("rules") or ():
        action = str(rule.get("action"))
        matches = reason in (rule.get("onJobFailureReasons") or (reason,))
        matches = matches and part in (rule.get("targetReplicatedJobs") or (part,))
        if matches and (action == "FailJobSet" or not rule.get("onJobFailureMessagePatterns")):
            if action == "FailJobSet" or action.endswith("IgnoreMaxRestarts"):
                return action != "FailJobSet"
            break
    restarts = status.get("restartsCountTowardsMax", status.get("restarts"))
    return int(policy.get("maxRestarts") or 0) > int(restarts or 0)


def _fails_volcano(job: Object, task: str | None) -> str | None:
    """Return why a Volcano Job ends with an evicted pod of a task; None: it starts another."""
    spec = job["spec"]
    of_task = [policy for entry in spec.get("tasks") or () if entry.get("name") == task
               for policy in entry.get("policies") or ()]  # fmt: skip
    for policy in (*of_task, *(spec.get("policies") or ())):
        if policy.get("action") in _ENDS and _ON_EVICTION & {policy.get("event"), *(policy.get("events") or ())}:
            return f"Job {job['metadata']['name']} ends with an evicted pod (policy {policy['action']})"
    return None


def _action_on_eviction(rules: Iterable[Object]) -> str | None:
    """Return what a policy does about an evicted pod: the first rule that matches decides; None: none does.

    Which exit code the pod ends with is not known. A rule on exit codes counts where it could fail the Job.
    """
    for rule in rules:
        codes, action = rule.get("onExitCodes"), str(rule.get("action"))
        excluded = codes is not None and set(_BY_SIGNAL) <= set(codes.get("values") or ())
        by_code = codes is not None and action.startswith("Fail") and (
            bool(set(_BY_SIGNAL) & set(codes.get("values") or ())) if codes.get("operator") == "In" else not excluded
        )  # fmt: skip
        if by_code or any(
            wanted.get("type") == "DisruptionTarget" and wanted.get("status", "True") == "True"
            for wanted in rule.get("onPodConditions") or ()
        ):
            return action
    return None
