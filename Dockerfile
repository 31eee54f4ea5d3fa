# syntax=docker/dockerfile:1
# dicedist with its CUDA libraries (pip's wheels carry them); the host needs the NVIDIA driver and container toolkit.
#
#   docker build --tag dicedist .
#   docker run --gpus all --shm-size 1g -v dicedist-data:/data -v dicedist-runs:/workspace/runs dicedist
#
# Behind a private index or proxy: --secret id=pip_config,src=pip.conf --secret id=certificates,src=ca-certificates.crt
ARG BASE_IMAGE=python:3.12-slim

# The package, in a stage of its own: build tools and sources stay here.
FROM ${BASE_IMAGE} AS package
ENV PATH=/opt/dicedist/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml constraints.txt ./
# Requirements from the one file that states them, so that the layers of packages do not change with the code.
RUN --mount=type=secret,id=pip_config,required=false \
    --mount=type=secret,id=certificates,required=false \
    export PIP_CONFIG_FILE=/run/secrets/pip_config PIP_CONSTRAINT=constraints.txt \
    && if [ -f /run/secrets/certificates ]; then export PIP_CERT=/run/secrets/certificates; fi \
    && python3 -m venv /opt/dicedist \
    && python -c 'import tomllib; t = tomllib.load(open("pyproject.toml", "rb")); p = t["project"]; \
open("build.txt", "w").write("\n".join(t["build-system"]["requires"])); \
extras = p["optional-dependencies"]; \
open("run.txt", "w").write("\n".join(p["dependencies"] + extras["dali"] + extras["mlflow"] + extras["onnx"]))' \
    && pip install -r build.txt
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
COPY --from=package /src/run.txt /src/constraints.txt /opt/
RUN --mount=type=secret,id=pip_config,required=false \
    --mount=type=secret,id=certificates,required=false \
    export PIP_CONFIG_FILE=/run/secrets/pip_config PIP_CONSTRAINT=/opt/constraints.txt PIP_BUILD_CONSTRAINT=/opt/constraints.txt \
    && if [ -f /run/secrets/certificates ]; then export PIP_CERT=/run/secrets/certificates; fi \
    && python3 -m venv /opt/dicedist \
    && pip install -r /opt/run.txt \
    # Any user may write where MLflow, caches and folders of other names go, as in /tmp.
    && useradd --uid 1000 --home-dir /workspace --no-create-home dicedist \
    && mkdir -p /data /workspace/runs \
    && chown dicedist /data /workspace/runs \
    && chmod 1777 /data /workspace /workspace/runs
# Copied, not installed from a mount: whether a mount has changed not every builder's cache looks at.
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
