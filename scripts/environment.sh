# Sourced by the other scripts: finds or makes a Python environment with what they need, and sets PYTHON.
#
# An environment of your own keeps its packages, torch among them, and gets those that are missing; this folder is not
# installed into it, but found by PYTHONPATH, so that several clones may share it: name its interpreter in
# DIFFSYNTH_LITE_PYTHON, or activate it. Otherwise .venv is made here, with the versions of constraints.txt.

MIN_FREE_MIB=4096

# Some containers set it; each process would then compile all that it imports again.
unset PYTHONDONTWRITEBYTECODE

fail() {
    echo "$0: $*" >&2
    exit 2
}

fail_install() {
    fail "the packages could not be installed; see pip's message above"
}

has_torch() {
    "$1" -c 'import sys, torch; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Whether a Python has all that .venv needs: the modules, and the headers that torch.compile builds with.
makes_venv() {
    "$1" -c 'import os, sys, sysconfig, venv, ensurepip
sys.exit(sys.version_info < (3, 11) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' >/dev/null 2>&1
}

find_python() {
    local candidate
    # pyenv builds without optimizations unless asked; with such a Python the tests take a fifth more CPU time than
    # with a distribution's.
    if [ "$(uname)" = Linux ] && [[ "$(command -v python3)" == *pyenv* ]] && makes_venv /usr/bin/python3; then
        echo /usr/bin/python3
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later was found; install one, or name its path in DIFFSYNTH_LITE_PYTHON"
}

require_disk_space() {
    local free_mib
    free_mib=$(df -Pm . | awk 'NR == 2 { print $4 }')
    if [ "$free_mib" -lt "$MIN_FREE_MIB" ]; then
        fail "$free_mib MiB are free here, and the installation needs about $MIN_FREE_MIB MiB (twice that with a CUDA build of torch); free some space," \
            "or use an environment that has torch already (DIFFSYNTH_LITE_PYTHON)"
    fi
}

# Whether the packages of pyproject.toml, with the extra $1, were installed by an earlier call.
is_installed() {
    [ -f "$STAMP" ] && grep -qxF "$(fingerprint "$1")" "$STAMP"
}

fingerprint() {
    echo "extra '$1' $PYTHON $PWD $(cat pyproject.toml constraints.txt | cksum)"
}

# What pyproject.toml asks for, with the extra $1, a requirement a line.
requirements() {
    "$PYTHON" - "$1" <<'END'
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
found = project["dependencies"] + extras.get(sys.argv[1], [])
while own := [line for line in found if line.startswith(project["name"])]:
    found.remove(own[0])
    for extra in own[0].partition("[")[2].rstrip("]").split(","):
        found += extras[extra]
print("\n".join(found))
END
}

make_venv() {
    local base
    base=$(find_python) || exit 2
    "$base" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
        fail "$base has no venv module; on Debian and Ubuntu: apt install python3-venv"
    require_disk_space
    echo "Making .venv ..."
    "$base" -m venv .venv || fail ".venv could not be made; see the message above"
}

# prepare_environment [EXTRA]: sets PYTHON to an interpreter with the package, and the extra, installed.
prepare_environment() {
    local extra=${1:-} own=""
    if [ -n "${DIFFSYNTH_LITE_PYTHON:-}" ]; then
        own=$DIFFSYNTH_LITE_PYTHON
        has_torch "$own" || fail "DIFFSYNTH_LITE_PYTHON=$own is not a Python 3.11 or later with a torch that works"
    elif [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && has_torch python; then
        own=$(command -v python)
    fi
    if [ -n "$own" ]; then
        PYTHON=$own
        STAMP=.venv-own.stamp
        export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
        echo "Using $PYTHON with its own packages; this folder is not installed there ('$PYTHON -m pip install -e .'" \
            "does that, and puts diffsynth-lite on its path)."
    else
        PYTHON=$PWD/.venv/bin/python
        STAMP=.venv/installed.stamp
        [ -x "$PYTHON" ] || make_venv
    fi
    is_installed "$extra" && return
    echo "Installing the packages that $PYTHON lacks (once; a few minutes) ..."
    if [ -n "$own" ]; then
        requirements "$extra" | "$PYTHON" -m pip install --quiet -r /dev/stdin || fail_install
    else
        require_disk_space
        # The one that came with Python may be years old: pip 23.2 takes 52 s for the packages, 26.3 takes 34 s.
        "$PYTHON" -m pip install --quiet --upgrade pip || fail "pip could not be installed"
        # Nothing is compiled: most files are never imported, and those that are get compiled then.
        # First, by itself: a package that asks for any torch would bring a newer one than is tested.
        "$PYTHON" -m pip install --quiet -c constraints.txt --no-compile torch || fail "torch could not be installed"
        "$PYTHON" -m pip install --quiet -c constraints.txt --no-compile --editable ".${extra:+[$extra]}" ||
            fail_install
    fi
    fingerprint "$extra" >>"$STAMP"
}
