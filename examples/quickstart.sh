#!/usr/bin/env bash
# A tour of the main job, with no server to set up: makes a virtual environment, installs the package
# from this checkout, and runs examples/quickstart/tour.py.
#
#   QUICKSTART_PYTHON   a Python with the package's dependencies, used as it is; nothing is installed
#   QUICKSTART_DIR      where the virtual environment and the data lie; default .quickstart
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

directory=${QUICKSTART_DIR:-.quickstart}
venv=$directory/venv

say() { printf '%s\n' "$*"; }

die() {
    printf '%s\n' "$*" >&2
    exit 1
}

# Runs a command quietly; what it printed is shown only when it fails.
quietly() {
    "$@" >"$directory/install.log" 2>&1 || {
        cat "$directory/install.log" >&2
        return 1
    }
}

find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is needed, and none was found."
}

has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

make_venv() {
    local python
    python=$(find_python)
    if ! has_venv "$python"; then
        [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null ||
            die "$python has no venv module. On Debian: apt-get install python3-venv"
        say "Installing python3-venv ..."
        quietly apt-get update -qq
        quietly env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends \
            -o DPkg::Lock::Timeout=300 python3-venv
        has_venv "$python" || die "$python has no venv module, nor has python3-venv brought it."
    fi
    say "Making a virtual environment in $venv ..."
    rm -rf "$venv"
    quietly "$python" -m venv "$venv"
}

# The stamp tells for which pyproject.toml, and in which folder, the last install was made.
install() {
    local stamp=$venv/installed wanted
    wanted="$(cksum <pyproject.toml) $PWD"
    if [[ -e $stamp && $(<"$stamp") == "$wanted" ]] && "$venv/bin/python" -c '' 2>/dev/null; then
        return
    fi
    make_venv
    say "Installing celery_outbox into it ..."
    quietly "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e . ||
        die "pip could not install the package."
    printf '%s\n' "$wanted" >"$stamp"
}

mkdir -p "$directory"
if [[ -n ${QUICKSTART_PYTHON:-} ]]; then
    python=$QUICKSTART_PYTHON
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
else
    python=$venv/bin/python
    install
fi
exec "$python" examples/quickstart/tour.py "$directory/data"
