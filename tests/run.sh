#!/usr/bin/env bash
# Everything from a fresh clone to a full check: the virtual environment, the servers, the
# linters and the tests. With arguments: only pytest, with these arguments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
python=$venv/bin/python
output=$(mktemp -d)
trap 'rm -rf "$output"' EXIT

say() { printf '%s\n' "$*"; }

die() {
    printf '%s\n' "$*" >&2
    exit 1
}

# Runs a command quietly; what it printed is shown only when it fails.
quietly() {
    "$@" >"$output/log" 2>&1 || {
        cat "$output/log" >&2
        return 1
    }
}

is_debian_root() { [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; }

apt_install() {
    say "Installing $* ..."
    quietly apt-get update -qq || return 1
    # The packages' own services are of no use here: the tests start private servers.
    local policy=/usr/sbin/policy-rc.d status=0
    if [[ ! -e $policy ]]; then
        trap 'rm -rf "$output" /usr/sbin/policy-rc.d' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
    else
        policy=
    fi
    quietly env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        -o DPkg::Lock::Timeout=300 "$@" || status=1
    [[ -z $policy ]] || rm -f "$policy"
    return "$status"
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is needed; none was found. Name one with PYTHON=/path/to/python3."
}

make_venv() {
    local base
    base=$(find_python)
    if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
        is_debian_root ||
            die "$base has no venv module: install it first (Debian: apt-get install python3-venv)."
        apt_install python3-venv || die "python3-venv could not be installed."
        "$base" -c 'import ensurepip, venv' 2>/dev/null ||
            die "$base has no venv module, nor has python3-venv brought it: set PYTHON to another."
    fi
    say "Making $venv with $("$base" --version) ..."
    rm -rf "$venv"
    quietly "$base" -m venv "$venv"
}

# The stamp tells for which pyproject.toml, and in which folder, the last install was made.
install_package() {
    local stamp wanted
    stamp=$venv/installed
    wanted="$(cksum <pyproject.toml) $PWD"
    if [[ -e $stamp && $(<"$stamp") == "$wanted" ]]; then
        return
    fi
    say "Installing celery_outbox and its development tools into $venv ..."
    rm -f "$stamp"
    quietly "$python" -m pip install --quiet --disable-pip-version-check -e '.[dev]' ||
        die "pip could not install the package."
    printf '%s\n' "$wanted" >"$stamp"
}

install_servers() {
    local packages
    packages=$("$python" -m tests.servers)
    if [[ -z $packages ]]; then
        return
    fi
    if is_debian_root; then
        # shellcheck disable=SC2086  # a list of package names
        apt_install $packages || say "Not all servers could be installed; going on without them."
    else
        say "Some tests need servers that are not installed. On Debian: apt-get install $packages"
    fi
}

failed=()

check() {
    local name=$1
    shift
    if "$@" >"$output/check" 2>&1; then
        say "ok      $name"
    else
        say "FAILED  $name"
        cat "$output/check"
        failed+=("$name")
    fi
}

if ! "$python" -c '' 2>/dev/null; then
    make_venv
fi
install_package
install_servers

if [[ $# -gt 0 ]]; then
    rm -rf "$output"
    exec "$python" -m pytest "$@"
fi

check "ruff format" "$python" -m ruff format --check .
check "ruff check" "$python" -m ruff check --quiet .
check "mypy" "$python" -m mypy
check "lint-imports" "$venv/bin/lint-imports"
"$python" -m pytest || failed+=("pytest")

if [[ ${#failed[@]} -gt 0 ]]; then
    printf 'Failed:'
    printf ' [%s]' "${failed[@]}"
    printf '\n'
    exit 1
fi
say "Every check passed."
