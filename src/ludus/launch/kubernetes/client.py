"""Requests to the API server of a Kubernetes cluster. The only module that imports the library `kubernetes` (extra `kubernetes`).

Objects are plain dictionaries, as in YAML files. The library reads the kubeconfig (or the pod's service account), runs credential
plugins and transfers JSON. Its errors are translated here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ludus.errors import LudusError, MissingExtra, UnknownName, UsageError, WorkerFailed
from ludus.launch.kubernetes.objects import MONITORING_API, Manifest

CONNECT_S, ANSWER_S = 10.0, 30.0
"""Time limits of a connection and of an answer."""

_PAGE = 500
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TRANSIENT = (429, 500, 502, 503, 504)
_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]*)" in API group "(?P<group>[^"]*)"'
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind:
    """A kind of objects: where the API server has them."""

    kind: str
    api: str
    plural: str

    def path(self, namespace: str, name: str = "") -> str:
        base = f"/api/{self.api}" if "/" not in self.api else f"/apis/{self.api}"
        return f"{base}/namespaces/{namespace}/{self.plural}" + (f"/{name}" if name else "")

    @property
    def group(self) -> str:
        return self.api.rpartition("/")[0]


KINDS: Mapping[str, Kind] = {
    kind.kind: kind
    for kind in (
        Kind("Pod", "v1", "pods"),
        Kind("Service", "v1", "services"),
        Kind("Secret", "v1", "secrets"),
        Kind("ConfigMap", "v1", "configmaps"),
        Kind("PersistentVolumeClaim", "v1", "persistentvolumeclaims"),
        Kind("Event", "v1", "events"),
        Kind("ResourceQuota", "v1", "resourcequotas"),
        Kind("ServiceAccount", "v1", "serviceaccounts"),
        Kind("Job", "batch/v1", "jobs"),
        Kind("Deployment", "apps/v1", "deployments"),
        Kind("StatefulSet", "apps/v1", "statefulsets"),
        Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies"),
        Kind("HorizontalPodAutoscaler", "autoscaling/v1", "horizontalpodautoscalers"),
        Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets"),
        Kind("RayJob", "ray.io/v1", "rayjobs"),
        Kind("PodMonitor", MONITORING_API, "podmonitors"),
        Kind("PrometheusRule", MONITORING_API, "prometheusrules"),
    )
}


def kind_of(manifest: Mapping[str, Any]) -> Kind:
    """Return the kind of an object, in the version of the API that it names."""
    known = KINDS[str(manifest["kind"])]
    return known if known.api == manifest["apiVersion"] else Kind(known.kind, str(manifest["apiVersion"]), known.plural)


class KubernetesClient:
    """A connection to one namespace of one cluster, opened by the first request. Thread-safe.

    `context`, `namespace`: "": those of the kubeconfig; in a pod without a kubeconfig, those of the pod.
    """

    def __init__(self, context: str = "", namespace: str = "") -> None:
        self._context, self._namespace = context, namespace
        self._requests: Any = None

    @property
    def namespace(self) -> str:
        self._connect()
        return self._namespace

    @property
    def context(self) -> str:
        """Name of the context; "" in a pod."""
        self._connect()
        return self._context

    # -- objects

    def create(self, manifest: Manifest) -> Manifest:
        """Create an object and return it as the server stores it."""
        kind = kind_of(manifest)
        what = f"{kind.kind} {manifest['metadata']['name']}"
        return self._json("POST", kind.path(self.namespace), "create", what, body=manifest)

    def get(self, kind: str, name: str) -> Manifest:
        """Raises UnknownName."""
        return self._json("GET", KINDS[kind].path(self.namespace, name), "get", f"{kind} {name}")

    def list(self, kind: str, selector: str = "", fields: str = "", *, connect_s: float = CONNECT_S) -> list[Manifest]:
        """Return the objects with these labels and fields. `connect_s`: time limit of each attempt to connect."""
        query = {"labelSelector": selector, "fieldSelector": fields, "limit": str(_PAGE)}
        found: list[Manifest] = []
        while True:
            page = self._json("GET", KINDS[kind].path(self.namespace), "list", f"{kind}s", query=query, connect_s=connect_s)
            found += page.get("items") or []
            more = (page.get("metadata") or {}).get("continue")
            if not more:
                return found
            query = {**query, "continue": more}

    def patch(self, kind: str, name: str, changes: Manifest) -> Manifest:
        """Merge changes into an object; None deletes a key. Raises UnknownName."""
        path, what = KINDS[kind].path(self.namespace, name), f"{kind} {name}"
        return self._json("PATCH", path, "patch", what, body=changes, content_type="application/merge-patch+json")

    def delete(self, kind: str, name: str, *, grace_s: int | None = None, cascade: bool = True) -> None:
        """Delete an object, and with `cascade` the objects that it owns, later. One that does not exist is no error."""
        options: Manifest = {"propagationPolicy": "Background" if cascade else "Orphan"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        with contextlib.suppress(UnknownName):
            self._json("DELETE", KINDS[kind].path(self.namespace, name), "delete", f"{kind} {name}", body=options)

    def read_log(self, pod: str, container: str, *, since: str = "", previous: bool = False, tail: int | None = None) -> str:
        """Return log lines, each with its time. `since`: a time (RFC 3339), in whole seconds. Raises UnknownName."""
        query = {"container": container, "timestamps": "true", "sinceTime": since, "previous": "true" if previous else ""}
        if tail is not None:
            query["tailLines"] = str(tail)
        path = f"{KINDS['Pod'].path(self.namespace, pod)}/log"
        return self._request("GET", path, "get", f"the log of {pod}", query=query).decode(errors="replace")

    # -- the cluster

    def version(self) -> str:
        """Return the version of the server, such as v1.32.1."""
        return str(self._json("GET", "/version", "get", "the version").get("gitVersion", ""))

    def find_api(self, api: str) -> bool:
        """Return whether the server has a version of an API, such as ray.io/v1."""
        try:
            self._json("GET", f"/apis/{api}", "get", f"the API {api}")
        except UnknownName:
            return False
        return True

    def allows(self, verb: str, resource: str, group: str = "", subresource: str = "") -> tuple[bool, str]:
        """Return whether the user may do this in the namespace, and the server's reason."""
        attributes = {"namespace": self.namespace, "verb": verb, "resource": resource, "group": group, "subresource": subresource}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        status = self._json("POST", path, "create", "an access review", body=review).get("status") or {}
        return bool(status.get("allowed")), str(status.get("reason") or "")

    def read(self, path: str, what: str) -> Manifest:
        """Read any other path of the API: objects outside of the namespace."""
        return self._json("GET", path, "get", what)

    # -- requests

    def _json(self, method: str, path: str, verb: str, what: str, **request: Any) -> Manifest:
        answer = self._request(method, path, verb, what, **request)
        try:
            found = json.loads(answer)
        except ValueError as error:
            raise WorkerFailed(f"The API server's answer about {what} is not JSON.", "Is a proxy in between?") from error
        return found if isinstance(found, dict) else {}

    def _request(
        self,
        method: str,
        path: str,
        verb: str,
        what: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = "application/json",
        connect_s: float = CONNECT_S,
    ) -> bytes:
        self._connect()
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            answer = self._requests.request(
                method,
                path,
                body=body,
                query_params=[(key, value) for key, value in (query or {}).items() if value],
                header_params={"Accept": "application/json, */*"},
                content_type=content_type,
                serialize=False,
                _request_timeout=(connect_s, ANSWER_S),
            )
            return bytes(answer.data)
        except ApiException as error:
            raise translate(error, verb, what, self._namespace) from error
        except _dynamic_error() as error:
            raise translate(error, verb, what, self._namespace) from error
        except HTTPError as error:
            raise WorkerFailed(
                f"The API server {self._requests.configuration.host} does not answer: {_plain(error)}.",
                "Check the network and `kubectl cluster-info`.",
            ) from error

    def _connect(self) -> None:
        if self._requests is None:
            self._requests = self._open()

    def _open(self) -> Any:
        try:
            from kubernetes import client, config
            from kubernetes.dynamic import DynamicClient
        except ImportError as error:
            raise MissingExtra("Jobs on Kubernetes need its client library.", "pip install 'ludus[kubernetes]'") from error
        from urllib3.util.retry import Retry

        configuration = client.Configuration()
        # Reads are repeated by urllib3. Writes are repeated only if no connection was made, since they may have happened.
        configuration.retries = Retry(
            total=3, connect=1, read=2, backoff_factor=0.3, status_forcelist=_TRANSIENT, raise_on_status=False
        )
        files = [path for path in os.environ.get("KUBECONFIG", "").split(os.pathsep) if path] or [
            str(Path.home() / ".kube/config")
        ]
        if not any(Path(path).expanduser().exists() for path in files):
            if self._context or not os.environ.get("KUBERNETES_SERVICE_HOST"):
                raise UsageError(
                    f"There is no kubeconfig: {' and '.join(files)} {'does' if len(files) == 1 else 'do'} not exist.",
                    "Set KUBECONFIG, or let your provider write one: `aws eks update-kubeconfig`, `gcloud container clusters get-credentials`, `kind export kubeconfig`.",
                )
            self._load_pod_credentials(config, configuration)
        else:
            self._load_kubeconfig(config, configuration, files)
        requests: Any = DynamicClient  # untyped
        return requests(client.ApiClient(configuration), discoverer=lambda *_: None)

    def _load_pod_credentials(self, config: Any, configuration: Any) -> None:
        try:
            config.load_incluster_config(configuration)
        except config.ConfigException as error:
            raise UsageError(
                f"This pod has no access to the API server: {error}",
                "Give its service account a token (automountServiceAccountToken) and a role.",
            ) from error
        with contextlib.suppress(OSError):
            self._namespace = self._namespace or (_SERVICE_ACCOUNT / "namespace").read_text().strip()
        self._namespace = self._namespace or "default"

    def _load_kubeconfig(self, config: Any, configuration: Any, files: Sequence[str]) -> None:
        known, current = read_contexts(files)
        name = self._context or current
        if name not in known:
            given = f"has no context {name!r}" if name else "has no current context"
            hint = f"Use one of: {', '.join(known) or 'none'} (--context, or `kubectl config use-context`)."
            raise UsageError(f"The kubeconfig {given}.", hint)
        with _logged_errors() as errors:
            try:
                config.load_kube_config(
                    os.pathsep.join(files), context=name, client_configuration=configuration, persist_config=False
                )
            except config.ConfigException as error:
                raise UsageError(f"The context {name} cannot be used: {_plain(error)}.") from error
        if errors:  # the library logs the failure of a credential plugin and continues without credentials
            raise UsageError(
                f"The credential plugin of the context {name} failed: {'; '.join(errors)}.",
                "Log in again with the tool of your provider; `kubectl get pods` must work.",
            )
        self._context = name
        self._namespace = self._namespace or known[name]


def read_contexts(files: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return context → its namespace, and the current context, of kubeconfig files, of which the first has precedence.

    Raises UsageError.
    """
    known: dict[str, str] = {}
    current = ""
    for path in files:
        try:
            data = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8")) or {}
            current = current or str(data.get("current-context") or "")
            for entry in data.get("contexts") or ():
                known.setdefault(str(entry["name"]), str((entry.get("context") or {}).get("namespace") or "default"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, yaml.YAMLError, AttributeError, TypeError, KeyError) as error:
            why = " ".join(str(error).split())
            raise UsageError(f"The kubeconfig {path} cannot be used: {why}.", "`kubectl config view` shows it.") from error
    return known, current


# -- errors -------------------------------------------------------------------------------------------------------------------


def translate(error: Any, verb: str, what: str, namespace: str) -> LudusError:
    """Translate an answer of the API server that is an error. `verb`, `what`: what was requested."""
    code, message = int(error.status or 0), status_message(error.body) or str(error.reason or "")
    if code == 404 and verb == "create" and message.startswith("namespaces "):
        return UsageError(
            f"There is no namespace {namespace}.", f"`kubectl create namespace {namespace}`, or choose another: --namespace."
        )
    if code == 404:
        return UnknownName(f"There is no {what} in the namespace {namespace}: {message}.".replace("..", "."))
    if code == 401:
        return UsageError(
            "The API server does not accept the credentials of the kubeconfig.",
            "They may have expired: log in again with the tool of your provider; `kubectl get pods` must work.",
        )
    if code == 403 and "exceeded quota" in message:
        return UsageError(
            f"The quota of the namespace {namespace} does not allow {what}: {message}.",
            "Request less (--cpus, --memory, --gpus, --workers), end other jobs, or ask for a larger quota: `kubectl describe resourcequota`.",
        )
    if code == 403:
        return _forbidden(message, verb, what, namespace)
    if code == 409:
        return UsageError(f"{what} exists already in the namespace {namespace}.", "Choose another --name, or delete it.")
    if code in (400, 422):
        return UsageError(f"The API server refuses {what}: {message}")
    if code == 0:
        return WorkerFailed(
            f"The connection to the API server failed: {_plain(message)}.", "Check its certificate and `kubectl cluster-info`."
        )
    if code in _TRANSIENT:
        return WorkerFailed(f"The API server could not {verb} {what} ({code}): {message}", "Try again in a moment.")
    return WorkerFailed(f"The API server could not {verb} {what} ({code}): {message}")


def _forbidden(message: str, verb: str, what: str, namespace: str) -> UsageError:
    found = _FORBIDDEN.search(message)
    if found is None:  # an admission controller, such as pod security
        return UsageError(f"The API server does not allow to {verb} {what} in the namespace {namespace}: {message}")
    resource = f"{found['resource']}.{found['group']}" if found["group"] else found["resource"]
    return UsageError(
        f"{found['user']} may not {found['verb']} {resource} in the namespace {namespace}.",
        f"It needs a role with the verb {found['verb']!r} for the resource {resource!r}; `ludus doctor --on kubernetes` lists all that are missing.",
    )


def status_message(body: object) -> str:
    """Return the message of a Status object, which the API server sends with every error."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    with contextlib.suppress(ValueError, AttributeError):
        return str(json.loads(text).get("message") or "")
    return text.strip()[:300]


def _dynamic_error() -> type[Exception]:
    from kubernetes.dynamic.exceptions import DynamicApiError

    found: type[Exception] = DynamicApiError
    return found


def _plain(error: object) -> str:
    """Return the cause of an error of urllib3 in one line, without its object."""
    reason = getattr(error, "reason", None) or error
    text = re.sub(r"<[^>]*>:? ?", "", str(reason))
    return " ".join(re.sub(r"^\w*(?:Error|Exception)\('?|\(Caused by .*$", "", text).split()).rstrip(".")


@contextlib.contextmanager
def _logged_errors() -> Iterator[Sequence[str]]:
    """Collect what is logged as an error to the root logger in this block."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, root = Collector(logging.ERROR), logging.getLogger()
    before = root.handlers[:]
    root.handlers = [handler]
    try:
        yield found
    finally:
        root.handlers = before
