#!/bin/sh
# Usage: [PYTHON=python3] [TORCH="torch==X"] lib/install.sh DIR
# Installs this tree in DIR, or upgrades what an earlier run put there, readable by all. All that can fail comes before
# the first file of DIR changes. TORCH, words for pip, also builds DIR/venv; without it DIR/venv is left alone.
set -eu
PYTHON=${PYTHON:-python3} TORCH=${TORCH:-}
parts='lib/python/torchrun_nccl bin/torchrun_nccl.sh examples/pytorch README.md CHANGELOG.md LICENSE'
parts="$parts modulefiles/NCI-ai-ml"

refuse() { printf 'install: %s\n' "$1" >&2; exit 2; }

[ "${1:-}" ] || refuse 'no folder named; say make install PREFIX=DIR'
umask 022
source=$(cd -- "$(dirname -- "$0")/.." && pwd -P)
mkdir -p -- "$1"
prefix=$(cd -- "$1" && pwd -P)
[ "$prefix" != "$source" ] || refuse "$prefix is the tree to install"
# A folder of someone else's, such as /usr/local, may hold a bin, a README.md or a venv that is not ours to replace.
[ -f "$prefix/bin/torchrun_nccl.sh" ] || [ -z "$(ls -A -- "$prefix")" ] ||
    refuse "$prefix is not empty, and no earlier install either"
[ -z "$TORCH" ] || [ ! -e "$prefix/venv" ] || [ -L "$prefix/venv" ] ||
    refuse "$prefix/venv was not made by this script; TORCH= leaves it alone"

# On the same file system as what it replaces.
stage=$(mktemp -d "$prefix/.install.XXXXXX")
venv=
trap 'rm -rf "$stage" ${venv:+"$venv"}' EXIT
trap 'exit 130' HUP INT TERM

for part in $parts; do
    mkdir -p "$stage/$(dirname "$part")"
    cp -R -- "$source/$part" "$stage/$part"
done
find "$stage" -name __pycache__ -prune -exec rm -rf {} +
chmod -R u+w,a+rX "$stage"
# Nothing of ours writes bytecode, so it is made here, for each Python at hand that could run it. By hash, since whoever
# copies the tree may not keep its times.
for python in "$PYTHON" python3.9 python3.10 python3.11 python3.12 python3.13 python3.14 python3.15; do
    "$python" -m compileall -q --invalidation-mode checked-hash "$stage/lib/python" >/dev/null 2>&1 ||
        [ "$python" != "$PYTHON" ] || refuse "$PYTHON cannot compile this tree; it must be Python 3.9 or newer"
done

# Each environment has a folder of its own: running jobs keep theirs, and an upgrade to the same one costs nothing.
if [ "$TORCH" ]; then
    id=$("$PYTHON" -c 'import sys; print(*sys.argv, sys.version, sys.executable)' "$TORCH" | cksum)
    name=.venv-${id% *}
    if ! "$prefix/$name/bin/python3" -c 'import torch' 2>/dev/null; then
        venv=$prefix/$name
        "$PYTHON" -m venv --clear "$venv"
        # shellcheck disable=SC2086 # words
        "$venv/bin/python3" -m pip install --quiet --disable-pip-version-check $TORCH
        "$venv/bin/python3" -c 'import torch'
    fi
    ln -s "$name" "$stage/venv"
    parts="venv $parts"
fi

# From here on nothing but renames, not to be stopped half-way; after a failed one the old parts are in $stage/old.
trap - EXIT
trap '' HUP INT TERM
mkdir "$stage/old"
for part in $parts; do
    mkdir -p "$prefix/$(dirname "$part")"
    # A file or a link is replaced in one step; only a folder is moved away first.
    [ -d "$prefix/$part" ] && [ ! -L "$prefix/$part" ] && mv -T -- "$prefix/$part" "$stage/old/$(basename "$part")"
    mv -T -- "$stage/$part" "$prefix/$part"
done
rm -rf "$stage"
printf 'Installed in %s; users say: module use %s/modulefiles\n' "$prefix" "$prefix"
