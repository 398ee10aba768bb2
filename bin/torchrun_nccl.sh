#!/bin/sh
# torchrun_nccl.sh SCRIPT ARGS...: runs a PyTorch script on every GPU of every node of a batch job; see --help.
# Finds its root and a Python. Names set outside $( ) bear our prefix: any other may be one that the caller exported.
_torchrun_nccl=$(readlink -e -- "$0" || readlink -e -- "$(command -v -- "$0")") && _torchrun_nccl=${_torchrun_nccl%/*/*}
_torchrun_nccl_py=$(set -f; set --; IFS=:; found=${TORCHRUN_NCCL_PYTHON:+ TORCHRUN_NCCL_PYTHON:}
    ask='from sys import *; ok = version_info >= (3, 9); print(executable if ok else version.split()[0]); exit(not ok)'
    for dir in $PATH "$_torchrun_nccl/venv/bin"; do [ ! -x "$dir/python3" ] || set -- "$@" "$dir/python3"; done
    [ -z "$TORCHRUN_NCCL_PYTHON" ] || set -- "$TORCHRUN_NCCL_PYTHON"
    for py; do # A wrapper such as pyenv's changes PATH: what it runs is taken instead, where that can be run here.
        exe=$("$py" -ISX utf8 -c "$ask") || { found="$found $py (${exe:-not usable}),"; continue; }
        [ "$exe" = "$py" ] || "$exe" -ISX utf8 -c "$ask" >&2 || exe=$py; printf %s "$exe"; exit
    done 2>/dev/null </dev/null
    echo "torchrun_nccl: found${found:- no Python,} but needs 3.9 or newer, on PATH or in TORCHRUN_NCCL_PYTHON" >&2
    exit 120) || exit
exec "$_torchrun_nccl_py" -I -S -B -X utf8 "$_torchrun_nccl/lib/python/torchrun_nccl/__main__.py" "$@"
