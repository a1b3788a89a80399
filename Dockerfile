# syntax=docker/dockerfile:1
# A release pins the base: --build-arg PYTHON_IMAGE=docker.io/library/python@sha256:<digest of the multi-platform index>.
# The lock file is made with this Python; linux/amd64 and linux/arm64 have wheels for all of it.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY requirements.lock requirements-runtime.lock ./
RUN python -m venv /opt/build && /opt/build/bin/pip install --require-hashes -r requirements.lock
RUN python -m venv --without-pip /opt/gpu-efficiency \
 && /opt/build/bin/pip --python /opt/gpu-efficiency/bin/python install --require-hashes --only-binary :all: \
      -r requirements-runtime.lock
COPY pyproject.toml README.md LICENSE ./
COPY exporter ./exporter
RUN /opt/build/bin/python -m build --wheel --no-isolation --outdir /dist \
 && /opt/build/bin/pip --python /opt/gpu-efficiency/bin/python install --no-deps /dist/*.whl \
 && /opt/gpu-efficiency/bin/python -m compileall -q /opt/gpu-efficiency/lib

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="gpu-efficiency-exporter" \
      org.opencontainers.image.description="Where every paid GPU-second goes, from real telemetry to Prometheus" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/gpu-efficiency /opt/gpu-efficiency
COPY LICENSE /usr/share/licenses/gpu-efficiency-exporter/LICENSE
# The two NVIDIA variables ask the NVIDIA container runtime for every GPU and for NVML alone; no other runtime reads them.
ENV PATH=/opt/gpu-efficiency/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility \
    GPU_EFFICIENCY_WEB_LISTEN_ADDRESS=:19400
USER 65532:65532
WORKDIR /
EXPOSE 19400
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:19400/healthz', timeout=4)"]
ENTRYPOINT ["gpu-efficiency"]
CMD ["serve"]
