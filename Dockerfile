# One image, two programs: migd (the command line and the agent) and migd-operator. docs/image.md says how to build it.
# BASE: any image with Python 3.11 or newer and its module venv. Nothing is installed into it but Python packages.
ARG BASE=python:3.13-slim

# ---- what others wrote: made anew only where the requirements change
FROM ${BASE} AS libraries
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PYTHONHASHSEED=0
COPY requirements-build.txt requirements-image.txt /src/
# Modules are compiled here, and by their contents: the root file system is read-only, and times differ between builds.
RUN python3 -m venv /opt/tools \
 && python3 -m venv --without-pip /opt/migd \
 && /opt/tools/bin/pip install --quiet --require-hashes --only-binary :all: -r /src/requirements-build.txt \
 && /opt/tools/bin/pip --python /opt/migd/bin/python3 install --quiet --no-compile --require-hashes --only-binary :all: \
    -r /src/requirements-image.txt \
 && /opt/migd/bin/python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/migd/lib

# ---- what we wrote
FROM libraries AS ours
COPY . /src/
RUN /opt/tools/bin/pip wheel --quiet --no-index --no-deps --no-build-isolation --wheel-dir /wheel /src \
 && /opt/tools/bin/pip --python /opt/migd/bin/python3 install --quiet --no-compile --no-warn-script-location \
    --no-index --no-deps --root /ours /wheel/*.whl \
 && /opt/migd/bin/python3 -m compileall -q --invalidation-mode unchecked-hash -s /ours -p / /ours/opt/migd/lib

# ---- what runs: no pip, no compiler
FROM ${BASE}
ENV PATH=/opt/migd/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["migd"]
COPY --from=libraries /opt/migd /opt/migd
COPY --from=ours /ours /
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="migd" \
      org.opencontainers.image.description="Changes how NVIDIA GPUs are partitioned, on a running machine" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
