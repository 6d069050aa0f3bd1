"""Write the software bill of materials of an image: CycloneDX JSON with the interpreter, the Python packages of an environment and of the
interpreter, and the Debian packages.

    python sbom.py /opt/ludus > sbom.cdx.json

The packages of the environment come from cyclonedx-bom, which must be installed next to the interpreter that runs this file. The
environment must have the same interpreter.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

_DPKG_FIELDS = "${db:Status-Status}\t${Package}\t${Version}\t${Architecture}\n"


def debian_components(lines: Iterable[str], distribution: str) -> list[dict[str, Any]]:
    """The installed packages among lines of `dpkg-query`: status, name, version and architecture, separated by tabs."""
    components = []
    for line in lines:
        status, name, version, architecture = line.rstrip("\n").split("\t")
        if status == "installed":
            purl = f"pkg:deb/{distribution.partition('-')[0]}/{quote(name)}@{quote(version)}?arch={architecture}&distro={distribution}"
            components.append({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl})
    return components


def interpreter_components(version: str, site_packages: Sequence[Path]) -> list[dict[str, Any]]:
    """The Python interpreter, which no package manager has installed in python:*-slim, and the packages that came with it."""
    found = {
        f"pkg:pypi/{one.metadata['Name'].lower().replace('_', '-')}@{quote(one.version)}": one
        for one in metadata.distributions(path=[str(path) for path in site_packages])
    }
    packages = [
        {"type": "library", "bom-ref": f"interpreter:{purl}", "name": one.metadata["Name"], "version": one.version, "purl": purl}
        for purl, one in sorted(found.items())
    ]
    purl = f"pkg:generic/python@{quote(version)}"
    return [{"type": "application", "bom-ref": purl, "name": "python", "version": version, "purl": purl}, *packages]


def main(environment: Path) -> None:
    tool = Path(sys.executable).with_name("cyclonedx-py")
    python = subprocess.run(
        [tool, "environment", "--output-format", "JSON", "--output-reproducible", environment / "bin" / "python"],
        check=True,
        stdout=subprocess.PIPE,
    )
    bom = json.loads(python.stdout)
    release = platform.freedesktop_os_release()
    packages = subprocess.run(
        ["dpkg-query", "--show", f"--showformat={_DPKG_FIELDS}"], check=True, stdout=subprocess.PIPE, text=True
    )
    distribution = f"{release['ID']}-{release['VERSION_ID']}"
    bom["components"] = [
        *bom["components"],
        *interpreter_components(platform.python_version(), sorted(Path(sys.base_prefix).glob("lib/python3*/site-packages"))),
        *debian_components(packages.stdout.splitlines(), distribution),
    ]
    json.dump(bom, sys.stdout, indent=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
