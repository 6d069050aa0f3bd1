"""Models of a run: the hub's operations on the model registry, and transfer of weights to and from other machines."""

from __future__ import annotations

import time
from pathlib import Path

from ludus.core import trust
from ludus.core.plugins import did_you_mean
from ludus.distributed.frames import Header
from ludus.distributed.hub.disk_thread import DiskThread
from ludus.distributed.hub.rpc import Operation, Peer, SendReply
from ludus.distributed.hub.weight_transfer import PART, WeightReceiver, WeightSender
from ludus.errors import UnknownName
from ludus.models.weights.model_registry import ModelRegistry

_MAX_WRITES = 8


class ModelService:
    """All models of a run. Runs on the hub's event loop; versions are written to disk in `disk`."""

    def __init__(self, registry: ModelRegistry, local_node: str, disk: DiskThread, reply: SendReply) -> None:
        self.registry, self._local_node, self._disk, self._reply = registry, local_node, disk, reply
        self.sender, self._receiver = WeightSender(reply), WeightReceiver(registry.staging)
        self._nodes: dict[Peer, str] = {}
        self._worker_addresses: dict[str, tuple[str, str]] = {}
        """Socket path of an inference worker → (its node, its address for other nodes)."""
        self._worker_owners: dict[str, Peer] = {}
        """Process that started the inference workers of a model; they end with it."""
        self.operations: dict[str, Operation] = {
            "model.find": self._find,
            "model.create": self._create,
            "model.publish": self._publish,
            "model.clone": self._clone,
            "model.workers": self._set_workers,
            "model.newer": self._wait_for_newer,
            "model.part": self._send_part,
            "stage.part": self._receive_part,
            "stage.drop": self._drop_upload,
            "graph.keep": self._keep_graph,
            "graph.part": self._send_graph_part,
        }

    def set_node(self, peer: Peer, node: str) -> None:
        self._nodes[peer] = node

    def on_disconnect(self, peer: Peer) -> None:
        self._nodes.pop(peer, None)
        self.sender.on_disconnect(peer)
        self._receiver.on_disconnect(peer)
        for name in [name for name, owner in self._worker_owners.items() if owner is peer]:
            for path in self.registry.info(name)["workers"]:
                self._worker_addresses.pop(path, None)
            self.registry.set_workers(name, [])
            del self._worker_owners[name]

    # -- registry

    def _find(self, peer: Peer, header: Header, body: bytes) -> Header:
        found = self.registry.find(header["name"], time.monotonic())
        if found is None:
            raise UnknownName(
                f"There is no model {header['name']!r} in this run.", did_you_mean(header["name"], self.registry.names())
            )
        return self._localize(peer, found)

    def _localize(self, peer: Peer, found: Header) -> Header:
        """Replace the inference workers of a model by addresses that this peer can reach."""
        here = self._node_of(peer)
        workers = [(path, *self._worker_addresses.get(path, (here, ""))) for path in found["workers"]]
        return {**found, "workers": [path if node == here else address for path, node, address in workers]}

    def _node_of(self, peer: Peer) -> str:
        return self._nodes.get(peer) or self._local_node

    def _create(self, peer: Peer, header: Header, body: bytes) -> Header:
        self._receiver.forget(header["file"])
        trust.allow(header["description"])  # a process of this user has an object of that class
        found = self.registry.create(
            header["name"],
            header["description"],
            header["file"],
            time.monotonic(),
            bool(header["override"]),
            header["interval"],
            header["keep"],
            header["settings"],
        )
        self.sender.on_publish(header["name"])
        return self._localize(peer, found)

    def _publish(self, peer: Peer, header: Header, body: bytes) -> Header:
        now = time.monotonic()
        self._receiver.forget(header["file"])
        version = self.registry.publish(header["name"], header["file"], int(header["step"]), now)
        self.sender.on_publish(header["name"])
        if self.registry.due(header["name"], now):
            keep = self.registry.make_keep_task(header["name"], now)
            if self._disk.pending < _MAX_WRITES:
                self._disk.submit(keep)
            else:
                keep()  # back-pressure on a publisher that is faster than the disk
        return {"version": version}

    def _clone(self, peer: Peer, header: Header, body: bytes) -> Header:
        return self._localize(peer, self.registry.clone(header["name"], int(header["step"]), time.monotonic()))

    def _set_workers(self, peer: Peer, header: Header, body: bytes) -> Header:
        paths, node = [str(path) for path in header["workers"]], self._node_of(peer)
        for path, address in zip(paths, header.get("addresses") or [""] * len(paths), strict=True):
            self._worker_addresses[path] = node, str(address)
        self.registry.set_workers(header["name"], paths)
        self._worker_owners[header["name"]] = peer
        return {}

    # -- transfer to and from other machines

    def _wait_for_newer(self, peer: Peer, header: Header, body: bytes) -> None:
        board = Path(self._find(peer, header, body)["board"])
        self.sender.wait_for_newer((peer, header["id"]), header["name"], int(header["version"]), float(header["wait_s"]), board)

    def _send_part(self, peer: Peer, header: Header, body: bytes) -> None:
        what = str(header["name"]), int(header["version"]), max(0, int(header["offset"])), max(0, min(PART, int(header["size"])))
        self._reply((peer, header["id"]), {}, self.sender.part(peer, *what))

    def _receive_part(self, peer: Peer, header: Header, body: bytes) -> Header:
        self._receiver.write_part(peer, header["file"], int(header["offset"]), body)
        return {}

    def _drop_upload(self, peer: Peer, header: Header, body: bytes) -> Header:
        self._receiver.drop(header["file"])
        return {}

    def _keep_graph(self, peer: Peer, header: Header, body: bytes) -> Header:
        return {"path": str(self._receiver.keep_graph(header["file"]))}

    def _send_graph_part(self, peer: Peer, header: Header, body: bytes) -> None:
        size, part = self._receiver.graph_part(header["file"], max(0, int(header["offset"])))
        self._reply((peer, header["id"]), {"size": size}, part)
