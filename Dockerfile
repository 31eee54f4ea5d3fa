# syntax=docker/dockerfile:1
# dicedist with its CUDA libraries (pip's wheels carry them); the host needs the NVIDIA driver and container toolkit.
#
#   docker build --tag dicedist .
#   docker build --build-arg VARIANT=cpu --tag dicedist:cpu .        a quarter of the size: no CUDA, no DALI
#   docker run --gpus all --shm-size 1g -v dicedist-data:/data -v dicedist-runs:/workspace/runs dicedist
#
# Behind a private index or proxy: --secret id=pip_config,src=pip.conf --secret id=certificates,src=ca-certificates.crt
ARG BASE_IMAGE=python:3.12-slim
ARG VARIANT=cuda

# The package, in a stage of its own: build tools and sources stay here.
FROM ${BASE_IMAGE} AS package
ENV PATH=/opt/dicedist/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml constraints.txt hatch_build.py launch/image-requirements ./
ARG VARIANT
# Requirements from the one file that states them, so that the layers of packages do not change with the code.
RUN --mount=type=secret,id=pip_config,required=false \
    --mount=type=secret,id=certificates,required=false \
    export PIP_CONFIG_FILE=/run/secrets/pip_config PIP_CONSTRAINT=constraints.txt \
    && if [ -f /run/secrets/certificates ]; then export PIP_CERT=/run/secrets/certificates; fi \
    && python3 -m venv /opt/dicedist \
    && case "$VARIANT" in cuda) extras=all ;; cpu) extras=all-cpu ;; *) echo "VARIANT is cuda or cpu" >&2; exit 1 ;; esac \
    && python image-requirements "$extras,gs" > run.txt \
    && pip install "$(grep '^hatchling==' constraints.txt)"
COPY README.md LICENSE ./
COPY conf conf
COPY dicedist dicedist
RUN pip install --no-deps --no-build-isolation --no-index --root /installed .

FROM ${BASE_IMAGE}
# A user may be given with --user: then there is no name in /etc/passwd, and libraries that ask for one take $USER.
ENV PATH=/opt/dicedist/bin:$PATH \
    HOME=/workspace \
    USER=dicedist \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    DICEDIST_DATA=/data \
    DICEDIST_NPROC=auto \
    MLFLOW_TRACKING_URI=sqlite:////workspace/runs/mlflow.db
ARG VARIANT
# InfiniBand: NCCL opens this library where there is one, and the host's devices need its providers.
RUN if [ "$VARIANT" = cuda ]; then \
        apt-get update && apt-get install --yes --no-install-recommends libibverbs1 ibverbs-providers \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=package /src/run.txt /src/constraints.txt /opt/
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=secret,id=pip_config,required=false \
    --mount=type=secret,id=certificates,required=false \
    export PIP_CONFIG_FILE=/run/secrets/pip_config PIP_CONSTRAINT=/opt/constraints.txt PIP_BUILD_CONSTRAINT=/opt/constraints.txt \
    && if [ -f /run/secrets/certificates ]; then export PIP_CERT=/run/secrets/certificates; fi \
    && python3 -m venv /opt/dicedist \
    # As in launch/install --cpu: only torch and torchvision come from this index.
    && if [ "$VARIANT" = cpu ]; then pip install --no-deps --index-url "$TORCH_CPU_INDEX" \
        $(sed --quiet --regexp-extended 's/^(torch|torchvision)==([0-9.]+).*/\1==\2+cpu/p' /opt/constraints.txt); fi \
    && pip install -r /opt/run.txt \
    # Any user may write where MLflow, caches and folders of other names go, as in /tmp.
    && useradd --uid 1000 --home-dir /workspace --no-create-home dicedist \
    && mkdir -p /data /workspace/runs \
    && chown dicedist /data /workspace/runs \
    && chmod 1777 /data /workspace /workspace/runs
# Copied, not installed from a mount: some builders' caches do not notice that a mount has changed.
COPY --from=package /installed /

USER 1000
WORKDIR /workspace
VOLUME ["/data", "/workspace/runs"]
ENTRYPOINT ["dicedist"]
CMD ["train"]

# Last, because every commit changes it.
ARG REVISION=unknown
LABEL org.opencontainers.image.title="dicedist" \
      org.opencontainers.image.description="Distributed training of deep ensembles with DICE" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.revision="${REVISION}"
