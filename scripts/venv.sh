#!/bin/sh
# Prepare a virtual environment with autopar installed for development, from nothing but a Python.
#
#   scripts/venv.sh newest DIR EXTRAS     newest Python that can install it, with the newest JAX
#   scripts/venv.sh oldest DIR EXTRAS     oldest Python, with the oldest JAX supported
#   scripts/venv.sh middle DIR EXTRAS     newest Python, with the JAX between them
#
# EXTRAS is a comma-separated list for pip ("" for none). An environment that is there is added to.
# PYTHON=/path/to/python overrides the choice of interpreter.
set -eu

WHICH=$1 DIR=$2 EXTRAS=$3
case $WHICH in
    oldest) JAX='jax==0.10.*' ;;
    middle) JAX='jax==0.11.*' ;;
    *) JAX='' ;;
esac
MINORS_NEWEST_FIRST='13 12 11'

# A command can exist and fail (a pyenv shim without a version set), and a Python can lack venv
# (Debian without python3-venv): only trying tells. Prints the version where it is of use.
version_of() {
    "$1" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# Every usable interpreter, one a line: those on the path, then pyenv's, then the usual folders.
candidates() {
    for minor in $1; do
        for python in "python3.$minor" python3 python \
            "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python3."$minor" \
            /usr/local/bin/python3."$minor" /opt/python/3."$minor"*/bin/python3."$minor"; do
            if [ "$(version_of "$python")" = "3.$minor" ]; then
                echo "$python"
                break
            fi
        done
    done
}

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

pythons() {
    if [ -n "${PYTHON:-}" ]; then
        case " $MINORS_NEWEST_FIRST " in
            *" $(version_of "$PYTHON" | cut -d. -f2) "*) echo "$PYTHON" ;;
        esac
    elif [ "$WHICH" = oldest ]; then
        candidates "$MINORS_NEWEST_FIRST" | tail -n 1
    else
        candidates "$MINORS_NEWEST_FIRST"
    fi
}

# Install into DIR. Python compiles what is imported, once. pip's words go to a file: they matter only where it fails.
install() {
    echo "Installing autopar${EXTRAS:+ and what its extra '$EXTRAS' needs} into $DIR (once; a minute or two)" >&2
    set -- --editable ".${EXTRAS:+[$EXTRAS]}"
    [ -z "$JAX" ] || set -- "$@" "$JAX"
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$DIR/bin/python" -m pip install --quiet --no-compile "$@" >"$DIR/install.log" 2>&1
}

if "$DIR/bin/python" -c 'import pip' 2>/dev/null; then
    install && exit 0
    echo "$DIR cannot be brought up to date: making it afresh" >&2
fi

found=$(pythons)
if [ -z "$found" ] && [ -n "${PYTHON:-}" ]; then
    fail "PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13 with its venv module: autopar needs one." \
        "Name another, or leave PYTHON out and the newest on this machine is used."
elif [ -z "$found" ]; then
    fail "autopar needs Python 3.11, 3.12 or 3.13 with its venv module; python3 here is $(python3 --version 2>&1 || echo none)." \
        "Install one (on Debian or Ubuntu: apt install python3.12 python3.12-venv), or name it: make PYTHON=/path/to/python3.12 …"
fi

last=''
IFS='
'  # one interpreter a line
for python in $found; do
    echo "Making $DIR with Python $(version_of "$python")" >&2
    rm -rf "$DIR"
    "$python" -m venv "$DIR"
    if install; then
        exit 0
    fi
    last=$(tail -n 20 "$DIR/install.log")
    echo "The packages do not install on Python $(version_of "$python")" >&2
done
rm -rf "$DIR"
fail "$last" "pip could not install autopar on any Python found here:" "$found"
