#!/bin/sh
# After VS Code has made the container. Nothing here may keep the editor from opening: a step that fails says so, and the next one follows.
cd "$(dirname "$0")/.." || exit 0

# The user inside has the number of whoever opened the folder, but where that was root, who has no number to give away
[ -w . ] || echo "Nothing can be written to this folder: it belongs to user $(stat -c %u .), and you are $(id -u) here. On the host, in this folder: sudo chown -R $(id -u):$(id -g) ."

# The image's own link to /workspace serves already; this one knows commands that the checkout has gained since
python -m pip install --user --quiet --no-deps --no-build-isolation --editable . || echo "The checkout could not be installed; the image's own link to it serves."

# git merges notebooks cell by cell: the image's /etc/gitconfig names the driver, so the hooks end with the container
git config --get merge.jupyternotebook.driver >/dev/null || echo "git does not know how to merge notebooks: rebuild the container."

gpubench labs --copy runs/labs || true      # a private copy of the notebooks, which git ignores
gpubench doctor || true      # 1: limits, 2: broken. Without a GPU the labs run on the CPU
exit 0
