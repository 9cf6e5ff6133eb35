#!/bin/bash
# code.sh: gives the code under /opt/gkr/code its metadata and its commands, without dependencies and without an index.
set -euo pipefail
code=/opt/gkr/code
rm -rf /tmp/installed
cp -a "$code" /tmp/source
uv pip install --quiet --offline --no-cache --no-deps --no-build-isolation --link-mode copy \
  --python /opt/gkr/venv/bin/python --target /tmp/installed /tmp/source
mv /tmp/installed/gkr-*.dist-info "$code/"
mv /tmp/installed/bin "$code/bin"
# By content, not by time: copies of the layer may change times.
/opt/gkr/venv/bin/python -m compileall -q --invalidation-mode checked-hash "$code"
rm -rf /tmp/installed /tmp/source
chmod -R u=rwX,go=rX "$code"
