#!/bin/bash
# packages.sh LOCK: what a hash lock names, into /opt/gkr/venv, which is made if need be.
#
# The caller's index settings are mounted under /run/secrets for this one command and go into no layer.
set -euo pipefail
lock=$1
if [[ -s /run/secrets/index_env ]]; then
  # shellcheck disable=SC1091
  . /run/secrets/index_env
fi
export UV_LINK_MODE=copy UV_NO_PROGRESS=1 UV_PYTHON_DOWNLOADS=never UV_CACHE_DIR=${UV_CACHE_DIR:-/var/cache/uv}

if [[ $lock == */uv.txt ]]; then
  python3 -m venv /opt/uv
  /opt/uv/bin/python -m pip install --quiet --no-cache-dir --no-compile --require-hashes -r "$lock"
  exit 0
fi
[[ -d /opt/gkr/venv ]] || uv venv --quiet --python /usr/bin/python3 /opt/gkr/venv
uv pip install --python /opt/gkr/venv/bin/python --require-hashes --compile-bytecode -r "$lock"
# The code lies outside the environment, so that a change of code is a layer of its own.
echo /opt/gkr/code >"$(/opt/gkr/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gkr.pth"
