"""A small API server over HTTP on loopback, for tests of the client and the backend.

It stores objects, selects by labels, deletes owned objects with their owner, and answers errors as Status objects. It has no
controllers and no kubelet: tests write the statuses of pods and jobs themselves.
"""

from __future__ import annotations

import contextlib
import copy
import http.server
import itertools
import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Manifest = dict[str, Any]

_CREATED = "2026-11-18T10:00:{:02}Z"


class ApiServer:
    """`denied`: (verb, resource) that the user may not do. `failures`: (method, resource) → (code, message, times left)."""

    def __init__(self, version: str = "v1.32.1") -> None:
        self.version = version
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.logs: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self.denied: set[tuple[str, str]] = set()
        self.failures: dict[tuple[str, str], tuple[int, str, int]] = {}
        self.service_network = "10.96.0."
        self.apis = {"batch/v1", "apps/v1", "networking.k8s.io/v1", "autoscaling/v1", "autoscaling/v2", "policy/v1"}
        self._lock = threading.RLock()
        self._addresses = itertools.count(1)
        self._created = itertools.count()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def write_kubeconfig(self, path: Path, namespace: str = "games", **user: Any) -> Path:
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": user or {"token": "a-token"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
        }  # fmt: skip
        path.write_text(yaml.safe_dump(config))
        return path

    # -- what controllers and kubelets would do

    def all(self, plural: str) -> list[Manifest]:
        with self._lock:
            return [copy.deepcopy(found) for (kind, _), found in self.objects.items() if kind == plural]

    def start_pod(self, job: str, name: str = "", *, plural: str = "jobs", **status: Any) -> Manifest:
        """Create the pod of a Job or Deployment, with this status."""
        with self._lock:
            owner = self.objects[plural, job]
            pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(owner["spec"]["template"])}
            pod["metadata"] |= {"name": name or f"{job}-{len(self.objects):05}"}
            pod["metadata"]["labels"] = {**pod["metadata"]["labels"], "job-name": job}
            reference = {"uid": owner["metadata"]["uid"], "name": job, "kind": owner["kind"], "apiVersion": owner["apiVersion"]}
            pod["metadata"]["ownerReferences"] = [reference]
            pod["status"] = {"phase": "Running", "startTime": "2026-11-18T10:00:00Z", **status}
            pod["spec"]["nodeName"] = "node-1"
            if "containerStatuses" not in status:
                pod["status"]["containerStatuses"] = [container(pod, running={})]
            return self._store("pods", pod)

    def set_status(self, plural: str, name: str, **status: Any) -> None:
        with self._lock:
            found = self.objects[plural, name]
            found["status"] = {**found.get("status", {}), **status}

    def end_pod(self, name: str, code: int, **terminated: Any) -> None:
        with self._lock:
            pod = self.objects["pods", name]
            state: dict[str, Any] = {"terminated": {"exitCode": code, **terminated}}
            pod["status"] |= {"phase": "Failed" if code else "Succeeded", "containerStatuses": [container(pod, **state)]}

    # -- requests

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16  # one packet for head and body: two would wait 40 ms for each other

            def log_message(self, *_: Any) -> None:
                pass

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                server.bodies.append(body)
                code, answer = server.answer(self.command, self.path, json.loads(body) if body else None)
                data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815

        return Handler

    def answer(self, method: str, target: str, body: Manifest | None) -> tuple[int, Manifest | str]:
        url = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        parts = url.path.strip("/").split("/")
        with self._lock:
            if url.path == "/version":
                return 200, {"gitVersion": self.version}
            if parts[0] == "apis" and len(parts) == 3:
                api = "/".join(parts[1:])
                return (
                    (200, {"kind": "APIResourceList"})
                    if api in self.apis
                    else _error(404, "the server could not find the requested resource")
                )
            if parts[-1] == "selfsubjectaccessreviews":
                assert body is not None
                asked = body["spec"]["resourceAttributes"]
                resource = f"{asked['resource']}/{asked['subresource']}" if asked.get("subresource") else asked["resource"]
                return 201, {**body, "status": {"allowed": (asked["verb"], resource) not in self.denied}}
            if "namespaces" not in parts or len(parts) <= parts.index("namespaces") + 2:
                return self._cluster_object(parts)
            at = parts.index("namespaces")
            if parts[0] == "apis" and "/".join(parts[1:at]) not in self.apis:
                return _error(404, "the server could not find the requested resource")
            plural, rest = parts[at + 2], parts[at + 3 :]
            self.requests.append((method, "/".join([plural, *rest])))
            return self._namespaced(method, plural, rest, query, body, parts[at + 1])

    def _cluster_object(self, parts: list[str]) -> tuple[int, Manifest | str]:
        kind, name = parts[-2:] if len(parts) > 3 else (parts[-1], "")
        found = self.objects.get((kind, name))
        if name and found is None:
            return _error(404, f'{kind} "{name}" not found')
        return 200, found or {"items": self.all(kind)}

    def _namespaced(
        self, method: str, plural: str, rest: list[str], query: dict[str, str], body: Manifest | None, namespace: str
    ) -> tuple[int, Manifest | str]:
        if (failure := self.failures.get((method, plural))) is not None:
            code, message, left = failure
            if left == 1:
                del self.failures[method, plural]
            else:
                self.failures[method, plural] = (code, message, left - 1)
            return _error(code, message)
        if method == "POST":
            assert body is not None
            name = body["metadata"]["name"]
            if (plural, name) in self.objects:
                return _error(409, f'{plural} "{name}" already exists')
            return 201, self._store(plural, body)
        if not rest:
            return 200, {"metadata": {}, "items": [each for each in self.all(plural) if _matches(each, query)]}
        if rest[1:] == ["log"]:
            return (200, self.logs[rest[0]]) if rest[0] in self.logs else _error(404, f'pods "{rest[0]}" not found')
        found = self.objects.get((plural, rest[0]))
        if found is None:
            return _error(404, f'{plural} "{rest[0]}" not found')
        if method == "PATCH":
            _merge(found, body or {})
        elif method == "DELETE":
            self._delete(plural, rest[0])
        return 200, copy.deepcopy(found)

    def _store(self, plural: str, body: Manifest) -> Manifest:
        stored = copy.deepcopy(body)
        created = _CREATED.format(next(self._created) % 60)
        stored["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": created}
        if plural == "services" and stored["spec"].get("clusterIP") != "None":
            stored["spec"]["clusterIP"] = f"{self.service_network}{next(self._addresses)}"
        self.objects[plural, stored["metadata"]["name"]] = stored
        return copy.deepcopy(stored)

    def _delete(self, plural: str, name: str) -> None:
        """Delete an object, and what it owns, as the garbage collector does."""
        found = self.objects.pop((plural, name), None)
        if found is None:
            return
        uid = found["metadata"]["uid"]
        for (kind, child), each in list(self.objects.items()):
            if any(reference["uid"] == uid for reference in each["metadata"].get("ownerReferences", ())):
                self._delete(kind, child)


def container(pod: Manifest, *, restarts: int = 0, last: Manifest | None = None, **state: Any) -> Manifest:
    """Return the status of the first container of a pod."""
    return {"name": pod["spec"]["containers"][0]["name"], "restartCount": restarts, "state": state, "lastState": last or {}}


def _matches(found: Manifest, query: dict[str, str]) -> bool:
    labels = found["metadata"].get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = term.partition("=")
        if labels.get(key) != value:
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        path, _, value = term.partition("=")
        outer, _, inner = path.partition(".")
        if (found.get(outer) or {}).get(inner) != value:
            return False
    return True


def _merge(target: Manifest, changes: Manifest) -> None:
    """RFC 7386."""
    for key, value in changes.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _error(code: int, message: str) -> tuple[int, Manifest]:
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


@contextlib.contextmanager
def running_api() -> Iterator[ApiServer]:
    server = ApiServer()
    try:
        yield server
    finally:
        server.close()
