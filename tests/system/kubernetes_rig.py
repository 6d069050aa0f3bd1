"""A real Kubernetes on this machine: etcd, API server, controller manager and scheduler, and nodes with kubelet, kube-proxy, containerd.

    with kubernetes_rig(nodes=2) as rig:
        rig.load_image(Path("cpu.tar"))
        rig.kubectl("apply", "-f", "-", stdin=manifest)

Every node, and the control plane, is a host of `tests.system.hosts`: it has its own network, PID space, /run, /tmp, /var/lib and /var/log.
So pods, mounts, interfaces and packet filter rules vanish with the hosts, and a node can lose its power or its cable. Pods reach each
other, services, and this machine under `machine_address`; this machine reaches nodes, pods and services. Nothing is routed elsewhere.
It needs Linux on x86-64, root, and control groups of version 1 (`tests.system.kubernetes.cgroups`); else the test is skipped.
There is no DNS, no metrics server and no network policy. Persistent volumes of the default storage class are directories below `volumes`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from ludus.io.atomic_file import replace_file
from tests import tools
from tests.system import hosts as namespaces
from tests.system.hosts import Hosts
from tests.system.kubernetes import cgroups
from tests.system.kubernetes.build import Programs, build
from tests.system.kubernetes.certificates import Authority
from tests.system.kubernetes.cgroups import Cgroups
from tests.system.kubernetes.images import PAUSE, names_in, write_busybox_image
from tests.waiting import wait_until

ADMIN = "admin"
RESTRICTED = "restricted"
"""Contexts of the kubeconfig file. The second may get and list pods of the namespace `default`, and nothing else."""

POD_USER = 10001
"""Owner of persistent volumes; storage that changes the group of a volume to that of the pod is not available here."""

LIFE_S = 6 * 3600
_BASE = Path("/var/tmp")
"""Not /tmp, of which every host has its own. A short path: that of a socket has at most 107 characters."""
_INTERFACE = "ludus-k8s"
_RIGS = 15
_START_S = 120.0
_CALL_S = 60.0
_LOAD_S = 600.0
_API_PORT = 6443
_KUBELET_PORT = 10250
_GATES = "TTLAfterFinished=true"
"""What later versions have by default."""


class KubernetesRig:
    """Nodes are called node1 …; the control plane is host 0, node i is host i. Made by `kubernetes_rig`."""

    def __init__(self, programs: Programs, base: Path, hosts: Hosts, number: int) -> None:
        self.programs, self.base, self.hosts = programs, base, hosts
        self.nodes = [f"node{i}" for i in range(1, len(hosts))]
        self.kubeconfig = base / "kubeconfig"
        self.volumes = base / "volumes"
        self._number = number
        self._tokens = {
            user: secrets.token_hex(16) for user in (ADMIN, RESTRICTED, "kube-proxy", "kcm", "scheduler", *self.nodes)
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._cgroups = Cgroups(base.name, self.nodes)
        for path in (base / "log", base / "etc", self.volumes):
            path.mkdir()
        self.volumes.chmod(0o777)

    # -- starting and ending

    def start(self) -> None:
        """Returns when all nodes are ready."""
        self._write_configuration()
        self._connect()
        for index in range(len(self.hosts)):
            self._prepare_host(index)
        self._start_control_plane()
        for node in self.nodes:
            self._start_node(node)
        self._wait("the containerd of each node", lambda: all(self._ctr(node, "version").returncode == 0 for node in self.nodes))
        pause = self.base / "busybox.tar"
        write_busybox_image(pause, self.programs.path("busybox"))
        self.load_image(pause)
        self._wait("the nodes", lambda: self.ready_nodes() == self.nodes)
        self._wait("the default service account", lambda: self.kubectl("get", "serviceaccount", "default", check=False))

    def close(self) -> None:
        """End everything at once; the directory stays."""
        self.hosts.down()
        with contextlib.suppress(subprocess.CalledProcessError):  # the kernel would do it too, a moment later
            _call("ip", "link", "del", self._interface)
        self._cgroups.remove()

    # -- using it

    @property
    def machine_address(self) -> str:
        """Address of this machine, as pods see it. Servers of a test that pods use listen there."""
        return self.hosts.machine_address

    @property
    def environment(self) -> dict[str, str]:
        return {"KUBECONFIG": str(self.kubeconfig), "PATH": f"{self.programs.path('kubectl').parent}:{os.environ['PATH']}"}

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True, timeout_s: float = _CALL_S) -> str:
        """What kubectl prints. With `check` an error is an AssertionError with its message, without it the result is empty."""
        done = subprocess.run(
            [self.programs.path("kubectl"), *words],
            input=stdin, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout if done.returncode == 0 else ""

    def get(self, *words: str) -> Any:
        """Objects as the API has them: `get("pods", "--selector=app=x")["items"]`."""
        return json.loads(self.kubectl("get", *words, "--output=json"))

    def objects(self, namespace: str = "default") -> list[str]:
        """Everything in a namespace that the cluster has not made by itself, as `kind/name`; persistent volumes too."""
        kinds = (
            "pods,jobs,deployments,replicasets,statefulsets,daemonsets,services,endpoints,configmaps,secrets,persistentvolumeclaims,"
            "persistentvolumes,horizontalpodautoscalers,poddisruptionbudgets,networkpolicies,serviceaccounts,roles,rolebindings,ingresses"
        )
        names = self.kubectl("get", kinds, f"--namespace={namespace}", "--output=name").split()
        own = re.compile(
            r"serviceaccount/default|secret/default-token-.*|configmap/kube-root-ca\.crt|(service|endpoints)/kubernetes|.*/restricted"
        )
        return [name for name in names if not own.fullmatch(name)]

    def pod_processes(self) -> list[psutil.Process]:
        """Processes of containers on all nodes, without those that hold the namespaces of a pod."""
        found = []
        for process in self._cgroups.processes():
            with contextlib.suppress(psutil.Error):
                if process.cmdline() != ["/bin/sleep", "2147483647"]:
                    found.append(process)
        return found

    def load_image(self, archive: Path) -> list[str]:
        """Import a docker-archive file into every node that is on. The names of its images."""
        with ThreadPoolExecutor() as pool:
            for node, done in zip(self.nodes, pool.map(lambda node: self._import(node, archive), self.nodes), strict=True):
                assert done.returncode == 0, f"{node}: {archive} was not imported: {done.stdout}"
        return names_in(archive)

    def ready_nodes(self) -> list[str]:
        ready = '{range .items[*]}{.metadata.name}={.status.conditions[?(@.type=="Ready")].status} {end}'
        states = self.kubectl("get", "nodes", f"--output=jsonpath={ready}", check=False).split()
        return [state.removesuffix("=True") for state in states if state.endswith("=True")]

    def log(self, name: str) -> str:
        """Of a daemon: `etcd`, `apiserver`, `kcm`, `scheduler`, or `node1-kubelet`, `node1-containerd`, `node1-proxy`."""
        with contextlib.suppress(OSError):
            return (self.base / "log" / f"{name}.log").read_text(errors="replace")
        return ""

    # -- faults

    def drain(self, node: str, timeout_s: float = _CALL_S) -> None:
        """Evict the pods of a node as `kubectl drain` does, and take no new ones until `uncordon`."""
        self.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", timeout_s=timeout_s)

    def uncordon(self, node: str) -> None:
        self.kubectl("uncordon", node)

    def power_off(self, node: str) -> None:
        """Everything on that node is gone at once; the control plane notices after some seconds."""
        self.hosts.power_off(self._host(node))

    def power_on(self, node: str) -> None:
        """The node comes back with its disk: images, and what kubelet remembers."""
        self.hosts.power_on(self._host(node))
        self._prepare_host(self._host(node))
        self._start_node(node)
        self._wait(node, lambda: node in self.ready_nodes())

    def cut(self, node: str) -> None:
        self.hosts.cut(self._host(node))

    def mend(self, node: str) -> None:
        self.hosts.mend(self._host(node))

    # -- addresses

    @property
    def _services(self) -> str:
        return f"10.80.{self._number}.0/24"

    def _pods(self, node: str) -> str:
        return f"10.79.{16 * self._number + self._host(node)}.0/24"

    @property
    def _all_pods(self) -> str:
        return f"10.79.{16 * self._number}.0/20"

    @property
    def _interface(self) -> str:
        return f"{_INTERFACE}{self._number}"

    def _host(self, node: str) -> int:
        return self.nodes.index(node) + 1

    def _address(self, node: str) -> str:
        return self.hosts.address(self._host(node))

    def _connect(self) -> None:
        """Routes of this machine to pods and services; they vanish with the interface."""
        self.hosts.connect_machine(self._interface)
        for node in self.nodes:
            _call("ip", "route", "add", self._pods(node), "via", self._address(node))
        _call("ip", "route", "add", self._services, "via", self._address(self.nodes[0]))

    def _prepare_host(self, index: int) -> None:
        """Directories that the programs use without being asked; routes to pods and services, and to nothing else."""
        log = self.base / "log" / f"host{index}"
        log.mkdir(exist_ok=True)
        routes = [f"{self._pods(node)} via {self._address(node)}" for node in self.nodes if self._host(node) != index]
        # A node's kube-proxy translates the addresses of services; the control plane has none and asks the first node.
        routes.append(f"{self._services} dev eth0" if index else f"{self._services} via {self._address(self.nodes[0])}")
        steps = [
            "mount -t tmpfs tmpfs /run",
            "mount -t tmpfs tmpfs /var/lib",
            f"mount --bind {log} /var/log",
            "mkdir /tmp/hostpath_pv",
            f"mount --bind {self.volumes} /tmp/hostpath_pv",
            "ip route del default",
            *(f"ip route add {route}" for route in routes),
            "echo 1 > /proc/sys/net/ipv4/ip_forward",
        ]
        self._call_in(index, "sh", "-c", " && ".join(steps))

    # -- daemons

    def _start_control_plane(self) -> None:
        address, pki = self.hosts.address(0), self.base / "pki"
        etcd = "http://127.0.0.1:2379"
        self._daemon(0, "etcd", "etcd", f"--data-dir={self.base}/etcd", f"--listen-client-urls={etcd}",
                     f"--advertise-client-urls={etcd}", "--listen-peer-urls=http://127.0.0.1:2380", "--unsafe-no-fsync")  # fmt: skip
        self._daemon(
            0, "apiserver", "kube-apiserver",
            f"--etcd-servers={etcd}", f"--bind-address={address}", f"--secure-port={_API_PORT}", f"--advertise-address={address}",
            f"--tls-cert-file={pki}/api.crt", f"--tls-private-key-file={pki}/api.key", f"--client-ca-file={pki}/ca.crt",
            f"--kubelet-client-certificate={pki}/api.crt", f"--kubelet-client-key={pki}/api.key",
            f"--kubelet-certificate-authority={pki}/ca.crt", "--kubelet-preferred-address-types=InternalIP",
            f"--token-auth-file={pki}/tokens.csv", f"--service-account-key-file={pki}/sa.crt",
            f"--service-account-signing-key-file={pki}/sa.key", "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
            f"--service-cluster-ip-range={self._services}", f"--feature-gates={_GATES}",
            # Pods of a lost node are replaced after seconds, not after five minutes.
            "--default-not-ready-toleration-seconds=3", "--default-unreachable-toleration-seconds=3",
        )  # fmt: skip
        self._wait("the API server", lambda: self.kubectl("get", "--raw=/readyz", check=False) == "ok", "apiserver")
        # It makes the directories of volumes, for itself only: so its user is that of our pods. It still has to read the files of root.
        self._daemon(
            0, "kcm", "kube-controller-manager",
            f"--kubeconfig={self._config('kcm')}", f"--root-ca-file={pki}/ca.crt",
            f"--service-account-private-key-file={pki}/sa.key", "--use-service-account-credentials", "--leader-elect=false",
            "--bind-address=127.0.0.1", "--port=0", "--allocate-node-cidrs=false", "--enable-hostpath-provisioner",
            "--node-monitor-period=1s", "--node-monitor-grace-period=8s", f"--feature-gates={_GATES}",
            f"--flex-volume-plugin-dir={self.base}/volume-plugins", "--pvclaimbinder-sync-period=2s",
            user=POD_USER,
        )  # fmt: skip
        self._daemon(0, "scheduler", "kube-scheduler", f"--kubeconfig={self._config('scheduler')}", "--leader-elect=false",
                     "--bind-address=127.0.0.1", "--port=0")  # fmt: skip
        self.kubectl("apply", "--filename=-", stdin=_OBJECTS)

    def _start_node(self, node: str) -> None:
        index, place = self._host(node), self.base / node
        self._daemon(index, f"{node}-containerd", "containerd", f"--config={place}/containerd.toml")
        self._daemon(
            index, f"{node}-kubelet", "kubelet", f"--config={place}/kubelet.json", f"--kubeconfig={self._config(node)}",
            "--container-runtime=remote", f"--container-runtime-endpoint=unix://{place}/containerd.sock", f"--root-dir={place}/kubelet",
            f"--hostname-override={node}", f"--node-ip={self._address(node)}", f"--cgroup-root={self._cgroups.path(node)}",
            f"--cert-dir={place}/pki",
        )  # fmt: skip
        self._daemon(index, f"{node}-proxy", "kube-proxy", f"--config={place}/proxy.json")

    def _daemon(self, index: int, name: str, program: str, *words: str, user: int = 0) -> None:
        command: list[str | Path] = [self.programs.path(program), *words]
        if user:
            ids = [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
            command = ["setpriv", *ids, "--inh-caps=+dac_override", "--ambient-caps=+dac_override", *command]
        with open(self.base / "log" / f"{name}.log", "ab") as log:
            self._daemons[name] = self.hosts.run(index, command, env=self._daemon_environment, cwd=self.base, output=log)

    @property
    def _daemon_environment(self) -> dict[str, str]:
        return {"PATH": self.programs.search_path, "HOME": str(self.base), "LANG": "C.UTF-8"}

    def _call_in(self, index: int, *words: str) -> None:
        with tempfile.TemporaryFile() as output:
            code = self.hosts.run(index, words, output=output).wait(_CALL_S)
            output.seek(0)
            assert code == 0, f"host {index}: {' '.join(words)}: {output.read().decode()}"

    def _ctr(self, node: str, *words: str | Path, timeout_s: float = _CALL_S) -> subprocess.CompletedProcess[str]:
        """containerd's own client: its socket is a file, which can be reached from here."""
        command = [self.programs.path("ctr"), f"--address={self.base}/{node}/containerd.sock", "--namespace=k8s.io", *words]
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False
        )

    def _import(self, node: str, archive: Path) -> subprocess.CompletedProcess[str]:
        return self._ctr(node, "images", "import", archive, timeout_s=_LOAD_S)

    def _wait(self, what: str, condition: Callable[[], object], daemon: str = "") -> None:
        def ended() -> str:
            gone = [name for name, process in self._daemons.items() if process.poll() is not None]
            return "".join(f"{name} has ended: {self.log(name)[-2000:]}" for name in gone)

        wait_until(condition, _START_S, what=lambda: f"{what}\n{self.log(daemon)[-2000:]}", failed=ended, poll_s=0.2)

    # -- files

    def _write_configuration(self) -> None:
        address = self.hosts.address(0)
        authority = Authority(self.base / "pki")
        first_service = self._services.replace(".0/24", ".1")
        authority.sign("api", "/O=system:masters/CN=kube-apiserver", [address, first_service], ["kubernetes.default.svc"])
        authority.sign("sa", "/CN=service-accounts")
        groups = {ADMIN: "system:masters", **dict.fromkeys(self.nodes, "system:nodes")}
        names = {"kcm": "system:kube-controller-manager", "scheduler": "system:kube-scheduler", "kube-proxy": "system:kube-proxy"}
        names |= {node: f"system:node:{node}" for node in self.nodes}
        lines = [f"{token},{names.get(user, user)},{user},{groups.get(user, '')}\n" for user, token in self._tokens.items()]
        replace_file(self.base / "pki" / "tokens.csv", "".join(lines), mode=0o600)
        self._write_kubeconfig(self.kubeconfig, authority, (ADMIN, RESTRICTED))
        for user in self._tokens:
            self._write_kubeconfig(self._config(user), authority, (user,))
        for node in self.nodes:
            self._write_node(node, authority)

    def _config(self, user: str) -> Path:
        return self.base / "etc" / f"{user}.kubeconfig"

    def _write_kubeconfig(self, path: Path, authority: Authority, users: Sequence[str]) -> None:
        """The first user is that of the current context."""
        cluster = {
            "server": f"https://{self.hosts.address(0)}:{_API_PORT}",
            "certificate-authority-data": base64.b64encode(authority.certificate.read_bytes()).decode(),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "rig", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self._tokens[user]}} for user in users],
            "contexts": [{"name": user, "context": {"cluster": "rig", "user": user, "namespace": "default"}} for user in users],
            "current-context": users[0],
        }
        replace_file(path, json.dumps(config, indent=1), mode=0o600)

    def _write_node(self, node: str, authority: Authority) -> None:
        place, address = self.base / node, self._address(node)
        (place / "network").mkdir(parents=True)
        certificate, key = authority.sign(node, f"/O=system:nodes/CN=system:node:{node}", [address], [node])
        (place / "containerd.toml").write_text(
            _CONTAINERD.format(place=place, pause=PAUSE, plugins=self.programs.network_plugins)
        )
        _write_json(
            place / "network" / "10-rig.conflist",
            {
                "cniVersion": "0.4.0",
                "name": "rig",
                "plugins": [
                    {
                        "type": "bridge",
                        "bridge": "pods",
                        "isGateway": True,
                        "hairpinMode": True,
                        "ipam": {
                            "type": "host-local",
                            "dataDir": f"{place}/addresses",
                            "ranges": [[{"subnet": self._pods(node)}]],
                            "routes": [{"dst": "0.0.0.0/0"}],
                        },
                    },
                    {"type": "portmap", "capabilities": {"portMappings": True}},
                ],
            },
        )
        _write_json(
            place / "kubelet.json",
            {
                "apiVersion": "kubelet.config.k8s.io/v1beta1",
                "kind": "KubeletConfiguration",
                "address": address,
                "port": _KUBELET_PORT,
                "readOnlyPort": 0,
                "healthzPort": 0,
                "tlsCertFile": str(certificate),
                "tlsPrivateKeyFile": str(key),
                "authentication": {
                    "anonymous": {"enabled": False},
                    "webhook": {"enabled": False},
                    "x509": {"clientCAFile": str(authority.certificate)},
                },
                "authorization": {"mode": "AlwaysAllow"},
                "cgroupDriver": "cgroupfs",
                "enforceNodeAllocatable": [],
                "failSwapOn": False,
                "makeIPTablesUtilChains": True,
                "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
                "imageGCHighThresholdPercent": 100,
                "oomScoreAdj": 0,  # a lower one needs a capability that root in a container has not
                "nodeStatusUpdateFrequency": "2s",
                "nodeLeaseDurationSeconds": 4,
                "syncFrequency": "5s",
                "volumePluginDir": f"{place}/volume-plugins",
                "featureGates": {"SizeMemoryBackedVolumes": True},
            },
        )
        _write_json(
            place / "proxy.json",
            {
                "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
                "kind": "KubeProxyConfiguration",
                "bindAddress": address,
                "mode": "iptables",
                "clusterCIDR": self._all_pods,
                "hostnameOverride": node,
                "clientConnection": {"kubeconfig": str(self._config("kube-proxy"))},
                "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
                "healthzBindAddress": "127.0.0.1:10256",
                "metricsBindAddress": "127.0.0.1:10249",
            },
        )


_CONTAINERD = """\
version = 2
root = "{place}/containerd"
state = "/run/containerd"
[grpc]
  address = "{place}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{place}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{place}/network"
"""

_OBJECTS = """\
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: restricted, namespace: default}
rules:
- {apiGroups: [""], resources: [pods], verbs: [get, list]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: restricted, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: restricted}
subjects:
- {apiGroup: rbac.authorization.k8s.io, kind: User, name: restricted}
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: rig, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: kubernetes.io/host-path
reclaimPolicy: Delete
"""


@contextlib.contextmanager
def kubernetes_rig(nodes: int = 2, *, life_s: int = LIFE_S) -> Iterator[KubernetesRig]:
    """A cluster with that many nodes; gone when the block is left. Skips the test where that is impossible, and says why.

    The first time it is built, which takes 6 to 30 minutes.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a Kubernetes of our own needs Linux and root")
    for program in ("iptables", "openssl", "ip"):
        tools.need(program)
    cgroups.require()
    programs = build()
    remove_stale()
    number = _free_number()
    base = Path(tempfile.mkdtemp(prefix=f"ludus-k8s-{os.getpid()}-", dir=_BASE))
    try:
        with namespaces.up(nodes + 1, subnet=f"10.77.{100 + number}", life_s=life_s) as hosts:
            rig = KubernetesRig(programs, base, hosts, number)
            try:
                rig.start()
                yield rig
            finally:
                rig.close()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def remove_stale() -> None:
    """Remove what clusters left whose process was killed: a directory, and empty control groups. All else ended with them."""

    def is_stale(name: str) -> bool:
        found = re.fullmatch(r"ludus-k8s-(\d+)-\w+", name)
        return found is not None and not psutil.pid_exists(int(found[1]))

    for group in cgroups.stale(is_stale):
        cgroups.remove_group(group)
    for path in _BASE.iterdir():
        if is_stale(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _free_number() -> int:
    for number in range(_RIGS):
        if not Path(f"/sys/class/net/{_INTERFACE}{number}").exists():
            return number
    pytest.skip(f"{_RIGS} clusters of these tests run already: ip link show")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


def _call(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=_CALL_S, capture_output=True)


def main(images: Sequence[str]) -> None:
    """`python -m tests.system.kubernetes_rig [IMAGE.tar …]`: a cluster for trying things by hand, until SIGINT or SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with kubernetes_rig(life_s=24 * 3600) as rig:
        names = [name for image in images for name in rig.load_image(Path(image))]
        sys.stdout.write(f"export KUBECONFIG={rig.kubeconfig} PATH={rig.programs.path('kubectl').parent}:$PATH\n")
        sys.stdout.write(f"# images: {' '.join(names) or 'none'}\n")
        sys.stdout.flush()
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
