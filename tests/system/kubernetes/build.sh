#!/bin/sh
# Builds Kubernetes 1.20 from Debian 12's source package and unpacks the programs that a node needs:  build.sh DIRECTORY
# Result: DIRECTORY/bin (kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy), DIRECTORY/packages (etcd,
# containerd, runc, kubectl, network plugins, busybox) and, last, the file DIRECTORY/ready with the version. Needs apt, dpkg-dev, make,
# rsync, jq and 3 GB while it builds; no root and, after the download, no network. Kubernetes vendors its own Go dependencies.
# A build that was interrupted continues where it stopped.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../../../scripts/private_apt.sh"

directory=$1
build=$directory/build
packages=$directory/packages
mkdir -p "$build/home" "$build/tmp" "$directory/bin"

if [ ! -e "$build/unpacked" ]; then
    rm -rf "$packages" "$build/packages" "$build/debs" "$build/go-debs" "$build/source"
    private_apt "$build/apt" bookworm bookworm-security
    unpack_packages "$build/debs" "$packages" \
        etcd-server containerd runc kubernetes-client containernetworking-plugins busybox-static
    # Only to build: the compiler of that release, and the reflect2 that works with it.
    unpack_packages "$build/go-debs" "$build/packages" golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev
    (cd "$build" && apt-get -qq source --download-only kubernetes)
    dpkg-source -x "$build"/kubernetes_*.dsc "$build/source"
    # The vendored reflect2 1.0.1 crashes under Go 1.18 and newer ("fatal error: fault" in mapiterinit, at the first custom resource).
    vendored=$build/source/vendor/github.com/modern-go/reflect2
    fixed=$build/packages/usr/share/gocode/src/github.com/modern-go/reflect2
    rm -f "$vendored"/*.go "$vendored"/*.s
    cp "$fixed"/*.go "$fixed"/*.s "$vendored"
    rm -f "$vendored"/*_test.go
    touch "$build/unpacked"
fi

version=$(sed -n 's/^Version: .*really\([0-9.]*\).*/v\1/p' "$build"/kubernetes_*.dsc | head -n 1)
export GOROOT="$build/packages/usr/lib/go-1.19" GOPATH="$build/source/.go" GOTMPDIR="$build/tmp" HOME="$build/home"
export PATH="$GOROOT/bin:$PATH" GO111MODULE=off GOPROXY=off CGO_ENABLED=0
export GOFLAGS=-tags=providerless  # without the interfaces of cloud providers: a third of the packages
export KUBE_GIT_VERSION="$version" KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20 KUBE_GIT_COMMIT=debian KUBE_GIT_TREE_STATE=archive
cd "$build/source"
mkdir -p .go/src/k8s.io
ln -sfn ../../.. .go/src/k8s.io/kubernetes
make generated_files
for program in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy; do
    echo "$(date +%T) $program"
    make WHAT="cmd/$program"
    cp -L "_output/bin/$program" "$directory/bin/"
done
echo "$version" >"$directory/ready"
rm -rf "$build"
