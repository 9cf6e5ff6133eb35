# What every shell of the image starts with: login shells read it from /etc/profile.d, all others through BASH_ENV.
#
# KubeRay starts Ray with `bash -c` or `bash -lc`, so the raylet and all it spawns inherit what is set here, whatever
# command KubeRay writes. POSIX shell, silent, and never the reason why a shell fails.

# /etc/profile of a login shell sets PATH anew.
case ":$PATH:" in
  *:/opt/gkr/venv/bin:*) ;;
  *) PATH=/opt/gkr/code/bin:/opt/gkr/venv/bin:$PATH:/usr/local/nvidia/bin; export PATH ;;
esac

# The fabric, once per tree of processes. What is mounted says which: the vendor's profile belongs to the installed
# version of its plugin, which refuses other values, so nothing of it is copied here.
if [ -z "${GKR_FABRIC:-}" ] && [ -n "${BASH_VERSION:-}" ]; then
  if [ -r /usr/local/gib/scripts/set_nccl_env.sh ]; then
    GKR_FABRIC=a3-ultra
    . /usr/local/gib/scripts/set_nccl_env.sh >/dev/null 2>&1 || :
    # Without it NCCL falls back to TCP when the plugin does not load: a hundred times slower, and nobody is told.
    NCCL_NET=gIB
    export GKR_FABRIC NCCL_NET
  elif [ -r /usr/local/nvidia/lib64/nccl-env-profile.sh ]; then
    GKR_FABRIC=a3-mega
    NCCL_LIB_DIR=/usr/local/nvidia/lib64
    NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY=/dev/aperture_devices
    . /usr/local/nvidia/lib64/nccl-env-profile.sh >/dev/null 2>&1 || :
    export GKR_FABRIC NCCL_LIB_DIR NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY
  fi
  if [ -n "${GKR_FABRIC:-}" ]; then
    # Control traffic takes the primary interface; the others belong to the fabric.
    : "${NCCL_SOCKET_IFNAME:=eth0}" "${GLOO_SOCKET_IFNAME:=eth0}"
    export NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME
    case ":${LD_LIBRARY_PATH:-}:" in
      *:/usr/local/nvidia/lib64:*) ;;
      *) LD_LIBRARY_PATH=/usr/local/nvidia/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}; export LD_LIBRARY_PATH ;;
    esac
  fi
fi
