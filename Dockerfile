# One image, two variants: build arguments say which, and the compose files give them.
# The digest decides what the base is (amd64 and arm64 alike); the tag tells people.
ARG PYTHON_IMAGE=docker.io/library/python:3.12.14-slim-trixie@sha256:f77ac9e44ae96ef2c90b8053ea08c31f8be030f824196b0ae4db6d462c84e51f

FROM ${PYTHON_IMAGE}
# torch.compile needs a compiler, notebooks are merged with git, which asks ssh for some addresses, and VS Code asks ps; nvtop is for
# the GPU variant. Versions are those of the base's Debian release.
ARG DEBIAN_PACKAGES=""
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git openssh-client procps ${DEBIAN_PACKAGES} \
    && rm -rf /var/lib/apt/lists/*

# `cpu`: CPU builds of torch and torchvision from PyTorch's own index; empty: both, with CUDA, from the default one.
# The same versions as everywhere, without a browser for tests. Nothing of the installer and of what it fetched stays; modules are
# compiled now, since nobody may write them later.
ARG TORCH_BACKEND=cpu
COPY constraints.txt /usr/local/share/gpubench/
WORKDIR /usr/local/share/gpubench
RUN grep -vE '^(playwright|uv)==' constraints.txt > requirements.txt \
    && pip install --no-cache-dir --target /tmp/uv --constraint constraints.txt uv \
    && /tmp/uv/bin/uv pip install --system --no-cache --compile-bytecode ${TORCH_BACKEND:+"--torch-backend=${TORCH_BACKEND}"} \
        --requirements requirements.txt \
    && python -c "import torch, torchvision; assert '${TORCH_BACKEND}'!='cpu' or torch.version.cuda is None, torch.version.cuda" \
    && rm -rf /tmp/*

# 1000:1000 for most people; VS Code gives the user its own number, and `user:` in a compose file another one, which may have no name.
# So whatever is written to is made here, before a volume lies over it, and open to any number. In a container there is one person.
# Locks lie there, too, since two containers that measure at once share a CPU but no /tmp; without the sticky bit, which would keep one
# number from opening the lock of another.
# Temporary files go to the volume, too: /tmp is in memory where the image is read-only.
# git's settings are the system's: a ~/.gitconfig made here would keep VS Code from bringing the one of the host, with name and address.
RUN groupadd --gid 1000 bench && useradd --uid 1000 --gid bench --create-home --shell /bin/bash bench \
    && install -d -o bench -g bench -m 1777 /cache /workspace \
        /cache/fastai /cache/torch /cache/pip /cache/matplotlib /cache/inductor /cache/triton \
    && install -d -o bench -g bench -m 777 /cache/locks \
    && chmod 1777 /home/bench \
    && git config --system safe.directory /workspace \
    && git config --system merge.jupyternotebook.name "notebooks, cell by cell" \
    && git config --system merge.jupyternotebook.driver "nbdev-merge %O %A %B %P"
ENV XDG_CACHE_HOME=/cache FASTAI_HOME=/cache/fastai TORCH_HOME=/cache/torch PIP_CACHE_DIR=/cache/pip MPLCONFIGDIR=/cache/matplotlib \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor TRITON_CACHE_DIR=/cache/triton \
    GPUBENCH_LOCKS=/cache/locks TMPDIR=/cache \
    VENV=/usr/local SHELL=/bin/bash PATH=/home/bench/.local/bin:$PATH

# The checkout comes last. The compose files lay the one on the host over it, and then that one's code and notebooks are used.
WORKDIR /workspace
COPY --chown=bench:bench . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable . \
    && python tools/set_up.py image --venv /usr/local \
    && rm -rf ./*.egg-info build
# a name and no number: VS Code's change of the number must hold for it too
# hadolint ignore=DL3066
USER bench
CMD ["gpubench", "doctor"]
