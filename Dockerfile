# syntax=docker/dockerfile:1
# dicedist with its CUDA libraries (pip's wheels carry them); the host needs the NVIDIA driver and container toolkit.
#
#   docker build -t dicedist .
#   docker run --gpus all --ipc=host -v ~/.cache/dicedist:/data -v "$PWD/runs":/workspace/runs dicedist
#   docker run -e PET_NPROC_PER_NODE=3 dicedist experiment=quickstart       # any option of torchrun, as PET_<OPTION>
#
# Behind a private index or proxy: --secret id=pip_config,src=pip.conf --secret id=certificates,src=ca-certificates.crt
ARG BASE_IMAGE=python:3.12-slim
FROM ${BASE_IMAGE}

LABEL org.opencontainers.image.title="dicedist" \
      org.opencontainers.image.description="Distributed training of deep ensembles with DICE" \
      org.opencontainers.image.licenses="MIT"

ENV PATH=/opt/dicedist/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=1 \
    PET_NPROC_PER_NODE=5 \
    DICEDIST_DATA=/data

WORKDIR /src
# What is needed to build and run, from these two files alone: a change of the code leaves this layer of several GB cached.
COPY pyproject.toml constraints.txt ./
RUN --mount=type=secret,id=pip_config,required=false \
    --mount=type=secret,id=certificates,required=false \
    export PIP_CONFIG_FILE=/run/secrets/pip_config PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
    && if [ -f /run/secrets/certificates ]; then export PIP_CERT=/run/secrets/certificates; fi \
    && python3 -m venv /opt/dicedist \
    && python -c 'import tomllib; t = tomllib.load(open("pyproject.toml", "rb")); \
print(*t["build-system"]["requires"], *t["project"]["dependencies"], sep="\n")' > /tmp/requirements.txt \
    && pip install -r /tmp/requirements.txt \
    && rm /tmp/requirements.txt

COPY README.md LICENSE ./
COPY conf conf
COPY dicedist dicedist
RUN pip install --no-deps --no-build-isolation . \
    && useradd --create-home --uid 1000 dicedist \
    && mkdir -p /data /workspace/runs \
    && chown -R dicedist /data /workspace

USER 1000
WORKDIR /workspace
VOLUME ["/data", "/workspace/runs"]
ENTRYPOINT ["torchrun", "-m", "dicedist.train"]
