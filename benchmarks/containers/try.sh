#!/bin/sh
# Runs a command in a built image as `bench` of the compose file would, without an engine: try.sh ROOT CHECKOUT CACHE COMMAND…
#   ROOT      the image's files (`buildah mount`), CHECKOUT what lies over /workspace, CACHE over /cache; the last two belong to the user
# A read-only root, scratch folders in memory, /dev/shm of 2 GB, no capability, nothing to be gained, no network but the machine's own
# loopback of that name space, a host name of its own, and a user and a group that have no name. For the image's own user and a root
# that may be written: AS=1000:1000 WRITABLE=1.
set -eu
root=$1 checkout=$2 cache=$3; shift 3
as=${AS:-4242:4343}
export root checkout cache as WRITABLE="${WRITABLE:-}"
# the image's own variables, and those of the compose file
env=$(sed -n '/^ENV/,/[^\\]$/p' "$checkout/Dockerfile" | sed 's/^ENV//; s/\\$//; s/:\$PATH/:\/usr\/local\/bin:\/usr\/local\/sbin:\/usr\/sbin:\/usr\/bin:\/sbin:\/bin/' | tr '\n' ' ')
export env
# shellcheck disable=SC2016
exec unshare --mount --pid --fork --ipc --net --uts sh -eu -c '
    ip link set lo up; hostname "$(od -An -N6 -tx1 /dev/urandom | tr -d " ")"
    mount --bind "$root" "$root"
    mount --bind "$checkout" "$root/workspace"; mount --bind "$cache" "$root/cache"
    [ -n "$WRITABLE" ] || mount -o remount,bind,ro "$root"
    mount -t proc proc "$root/proc"; mount -t sysfs -o ro sysfs "$root/sys"; mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    for o in null zero full random urandom; do touch "$root/dev/$o"; mount --bind "/dev/$o" "$root/dev/$o"; done
    ln -s /proc/self/fd "$root/dev/fd"
    mkdir "$root/dev/shm"; mount -t tmpfs -o size=2g,mode=1777,noexec tmpfs "$root/dev/shm"
    [ -n "$WRITABLE" ] || for o in tmp home/bench; do mount -t tmpfs -o mode=1777 tmpfs "$root/$o"; done
    exec chroot "$root" setpriv --reuid="${as%:*}" --regid="${as#*:}" --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs \
        env -i HOME=/home/bench USER=bench container=try $env sh -c "cd /workspace && exec \"\$@\"" sh "$@"' sh "$@"
