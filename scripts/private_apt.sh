# shellcheck shell=sh
# Sourced by scripts that unpack Debian packages of a given suite beside the system's own. Needs no root.
# private_apt DIRECTORY SUITE…: writes an apt configuration below DIRECTORY, exports APT_CONFIG and downloads the package lists.
# SUITE is a suite of the Debian archive, or `NAME-security`. The system's lists and sources are not changed.
private_apt() {
    apt_dir=$1
    shift
    mkdir -p "$apt_dir/lists/partial" "$apt_dir/cache/archives/partial" "$apt_dir/empty"
    : >"$apt_dir/status"  # as if nothing was installed: what a package depends on is listed too
    : >"$apt_dir/sources.list"
    site=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep '/debian$' | head -n 1)
    site=${site:-http://deb.debian.org/debian}
    for suite in "$@"; do
        case $suite in *-security) archive=$site-security ;; *) archive=$site ;; esac
        for kind in deb deb-src; do
            echo "$kind [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive $suite main" >>"$apt_dir/sources.list"
        done
    done
    cat >"$apt_dir/apt.conf" <<END
Dir::Etc::sourcelist "$apt_dir/sources.list";
Dir::Etc::sourceparts "$apt_dir/empty";
Dir::Etc::preferencesparts "$apt_dir/empty";
Dir::State::Lists "$apt_dir/lists";
Dir::State::status "$apt_dir/status";
Dir::Cache "$apt_dir/cache";
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::Retries "2";
Acquire::http::Timeout "60";
END
    export APT_CONFIG="$apt_dir/apt.conf"
    apt-get -qq update
}

# unpack_packages DOWNLOADS ROOT NAME…: unpacks packages below ROOT; no maintainer script runs, no dependency is followed.
unpack_packages() {
    downloads=$1
    root=$2
    shift 2
    mkdir -p "$downloads" "$root"
    (cd "$downloads" && apt-get -qq download "$@")
    for deb in "$downloads"/*.deb; do dpkg-deb -x "$deb" "$root"; done
}
