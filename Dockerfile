# One image for all stages; the command says which one runs (see compose.yaml).
#   docker build -t transom .
#   docker build -t transom --build-arg TORCH="torch==2.13.0+cpu" --build-arg PIP_EXTRA_INDEX_URL=INDEX .
# The second makes an image without CUDA, of about a third of the size, from an index of PyTorch's CPU builds.
FROM debian:bookworm-slim AS build

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates g++ \
    && rm -rf /var/lib/apt/lists/*

# Torch first and alone: the largest layer, and the one that changes least.
ARG TORCH="torch==2.13.0"
# Read by pip in this stage only. Not for passwords: the image's history shows them.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
RUN python3 -m venv /opt/transom \
    && /opt/transom/bin/pip install --no-cache-dir "$TORCH"

WORKDIR /src
COPY . .
# A normal install: what runs is what a wheel holds. The CPU kernels are compiled here for kinds of CPUs: the
# image runs elsewhere, without a C++ compiler and with nothing but /tmp and its volumes to write to.
RUN /opt/transom/bin/pip install --no-cache-dir . "$TORCH" \
    && cd / && /opt/transom/bin/python -m transom.kernels.native_build --prebuild

FROM debian:bookworm-slim

# Triton compiles the kernels for a GPU at their first use, and with a C compiler what launches them.
# A volume gets the owner of the folder that it is laid over.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 ca-certificates libstdc++6 \
       gcc libc6-dev libpython3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home --home-dir /home/transom transom \
    && install -d -o transom -g transom /fleet /home/transom/.cache

COPY --from=build /opt/transom /opt/transom
ENV PATH=/opt/transom/bin:$PATH PYTHONUNBUFFERED=1 TRITON_HOME=/home/transom/.cache

USER transom
WORKDIR /home/transom
ENTRYPOINT ["transom"]
CMD ["up", "--host", "0.0.0.0"]
EXPOSE 8000
