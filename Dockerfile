# The daemon alone: no compiler, no pip, no shell of its own; root owns every file and 65532 runs it. See docs/image.md.
# A release pins its bases: --build-arg PYTHON_IMAGE=docker.io/library/python@sha256:<digest of the multi-platform index>,
# and DCGM_IMAGE likewise. linux/amd64 and linux/arm64 have wheels for all of both locks; arm64 was never run.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
# 1 adds NVIDIA's DCGM libraries and Python bindings, from NVIDIA's own image. Read docs/image.md before you publish that.
ARG WITH_DCGM=0
ARG DCGM_IMAGE=nvcr.io/nvidia/cloud-native/dcgm:4.5.2-1-ubuntu22.04

FROM ${PYTHON_IMAGE} AS build
# With it, the same sources give the same files.
ARG SOURCE_DATE_EPOCH
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_NO_COMPILE=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY requirements-image.lock requirements-runtime.lock ./
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --require-hashes --only-binary :all: -r requirements-image.lock
RUN python -m venv --without-pip /opt/gpu-efficiency \
 && /opt/build/bin/pip --python /opt/gpu-efficiency/bin/python install --require-hashes --only-binary :all: \
      -r requirements-runtime.lock
COPY pyproject.toml README.md LICENSE ./
COPY exporter ./exporter
# Byte code that is never compared with its source: the same bytes in every build, and nothing to stat at start.
RUN /opt/build/bin/python -m build --wheel --no-isolation --outdir /dist \
 && /opt/build/bin/pip --python /opt/gpu-efficiency/bin/python install --no-index --find-links /dist --no-deps \
      gpu-efficiency-exporter \
 && /opt/gpu-efficiency/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/gpu-efficiency/lib \
 && /opt/build/bin/cyclonedx-py environment --output-reproducible --validate --pyproject pyproject.toml \
      --output-file /dist/sbom.cdx.json /opt/gpu-efficiency/bin/python

FROM scratch AS dcgm-0
WORKDIR /dcgm

# The client's library, the modules an engine of our own loads, and the bindings; a release that moved one of the first
# two is refused here, not found out on a node.
FROM ${DCGM_IMAGE} AS dcgm-1
RUN mkdir /dcgm \
 && cp -a --parents /usr/lib/*-linux-gnu/libdcgm.so.4* /usr/share/datacenter-gpu-manager-4/bindings/python3 /dcgm/ \
 && find /usr/lib/*-linux-gnu -maxdepth 1 \( -name 'libdcgmmodule*.so*' -o -name 'libnvperf_dcgm_host.so*' \) \
      -exec cp -a --parents -t /dcgm {} + \
 && find /usr/share/doc -maxdepth 1 -name 'datacenter-gpu-manager*' -exec cp -a --parents -t /dcgm {} + \
 && find /dcgm -name __pycache__ -prune -exec rm -r {} +

# Builders make only the one of the two that is named: a stage, so it has no tag.
# hadolint ignore=DL3006
FROM dcgm-${WITH_DCGM} AS dcgm

FROM ${PYTHON_IMAGE}
COPY --from=dcgm /dcgm/ /
COPY --from=build /opt/gpu-efficiency /opt/gpu-efficiency
COPY --from=build /dist/sbom.cdx.json /usr/share/doc/gpu-efficiency-exporter/sbom.cdx.json
COPY LICENSE /usr/share/doc/gpu-efficiency-exporter/LICENSE
# The two NVIDIA variables ask the NVIDIA container runtime for every GPU and for NVML alone; no other runtime reads them.
ENV PATH=/opt/gpu-efficiency/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility
USER 65532:65532
WORKDIR /
EXPOSE 19400
STOPSIGNAL SIGTERM
# Finds port, TLS and client certificates as the daemon was told them; what it cannot see, docs/image.md names.
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s \
  CMD ["python", "-I", "-m", "exporter.cli.healthcheck"]
ENTRYPOINT ["gpu-efficiency"]
CMD ["serve"]
# Last, for they differ in every build. `source` and `url` are given by who publishes it: --label.
ARG PYTHON_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.title="gpu-efficiency-exporter" \
      org.opencontainers.image.description="Where every paid GPU-second goes, from real telemetry to Prometheus" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
