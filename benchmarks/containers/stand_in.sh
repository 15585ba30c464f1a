#!/bin/sh
# A stand-in for the base image, for a machine that reaches Debian's packages and no image registry: stand_in.sh FOLDER PYTHON
# PYTHON is the prefix of a Python 3.11 built from source on Debian 12; it comes to lie in /usr/local, as in the official image.
set -eu
folder=$1 python=$2
debootstrap --variant=minbase --include=ca-certificates,netbase,tzdata,libreadline8,libsqlite3-0,libffi8,libexpat1,libssl3,libbz2-1.0,liblzma5,libncursesw6,libuuid1 \
    bookworm "$folder"
tar -C "$python" -c --exclude='*/site-packages/*' --exclude=lib/python3.11/test --exclude=lib/python3.11/idlelib --exclude=lib/python3.11/tkinter \
    --exclude='*/__pycache__' --exclude='*.a' bin/python3.11 lib/libpython3.11.so lib/libpython3.11.so.1.0 lib/python3.11 include | tar -C "$folder/usr/local" -x
for o in python3 python; do ln -sf python3.11 "$folder/usr/local/bin/$o"; done
chroot "$folder" ldconfig
chroot "$folder" /usr/local/bin/python -m ensurepip
ln -sf pip3 "$folder/usr/local/bin/pip"
# the official image's form of the list of sources, in which the Dockerfile adds Debian's contrib
mirror=$(sed -n 's/^deb \([^ ]*\) .*/\1/p' "$folder/etc/apt/sources.list")
printf 'Types: deb\nURIs: %s\nSuites: bookworm\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' "$mirror" \
    > "$folder/etc/apt/sources.list.d/debian.sources"
rm -rf "$folder/etc/apt/sources.list" "$folder"/var/cache/apt/*.bin "$folder"/var/cache/apt/archives/*.deb "$folder"/var/lib/apt/lists/*
find "$folder/usr/local" -name __pycache__ -prune -exec rm -rf {} +
tar -C "$folder" -c . | docker import -c 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8' -c 'CMD ["python3"]' - python:stand-in
