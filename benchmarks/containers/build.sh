#!/bin/sh
# Builds a variant with buildah, which needs no engine and no privileges but root's: build.sh cpu|gpu
#   PYTHON_IMAGE   another base, such as a local stand-in; what the Dockerfile names, if not set
#   TORCH_BACKEND  another index than the compose file's; set but empty: the default index, with CUDA
#   OPTIONS        more options, such as --volume /etc/pip.conf:/etc/pip.conf:ro: there while building, not in the image
set -eu
variant=$1
cd "$(dirname "$0")/../.."
file=docker-compose.$variant.yml
arg() { sed -n "s/^      $1: *\"\{0,1\}\([^\"]*\)\"\{0,1\}\( *#.*\)\{0,1\}\$/\1/p" "$file" | sed 's/^\${[A-Z_]*:-\(.*\)}$/\1/'; }
backend=${TORCH_BACKEND-$(arg TORCH_BACKEND)}
image=$(sed -n 's/^  image: *//p' "$file" | sed 's/\${[^}]*}//g')
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER="${STORAGE_DRIVER:-vfs}"
echo "$image: TORCH_BACKEND='$backend' DEBIAN_PACKAGES='$(arg DEBIAN_PACKAGES)'"
# shellcheck disable=SC2086
exec nice -n 15 buildah bud --network host ${PYTHON_IMAGE:+--build-arg PYTHON_IMAGE=$PYTHON_IMAGE --pull-never} \
    --build-arg TORCH_BACKEND="$backend" --build-arg DEBIAN_PACKAGES="$(arg DEBIAN_PACKAGES)" ${OPTIONS:-} -t "$image" .
