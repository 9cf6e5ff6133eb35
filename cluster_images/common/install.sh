#!/bin/bash
# install.sh NAME=VERSION ...: Debian packages at exact versions, and nothing left behind but them.
#
# PINS=minimum takes those versions or newer: for a local base, whose archive is at another date than the pinned base.
# /run/secrets/apt_sources, where it is mounted, stands for the base's own sources and goes into no layer.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

options=(-o Acquire::Retries=3)
if [[ -s /run/secrets/apt_sources ]]; then
  options+=(-o Dir::Etc::SourceList=/run/secrets/apt_sources -o Dir::Etc::SourceParts=-)
fi
apt-get "${options[@]}" -qq update

wanted=()
for pin in "$@"; do
  name=${pin%%=*} version=${pin#*=}
  if [[ $name == "$pin" ]]; then
    echo "install.sh: $pin has no version; write $pin=VERSION" >&2
    exit 2
  fi
  if [[ ${PINS:-exact} == exact ]]; then
    wanted+=("$pin")
    continue
  fi
  candidate=$(apt-cache "${options[@]}" policy "$name" | awk '/Candidate:/ {print $2}')
  if ! dpkg --compare-versions "${candidate:-0}" ge "$version"; then
    echo "install.sh: $name is ${candidate:-unknown} in this archive, older than $version" >&2
    exit 1
  fi
  wanted+=("$name=$candidate")
done
if ! apt-get "${options[@]}" -qq install --yes --no-install-recommends --allow-downgrades "${wanted[@]}" >/tmp/apt.log 2>&1
then
  tail -n 20 /tmp/apt.log >&2
  echo "install.sh: if a version has left the archive, pin the one it has now (cluster_images/*/Dockerfile)" >&2
  exit 1
fi
apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log /var/log/alternatives.log /tmp/apt.log
