# One image for all stages; the command says which one runs (see compose.yaml).
#   docker build -t transom .
#   docker build -t transom --build-arg TORCH="torch==2.13.0" .
FROM debian:bookworm-slim AS build

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
    && rm -rf /var/lib/apt/lists/*

# Torch first and alone: the largest layer, and the one that changes least.
ARG TORCH="torch==2.13.0"
RUN python3 -m venv /opt/transom \
    && /opt/transom/bin/pip install --no-cache-dir "$TORCH"

WORKDIR /src
COPY . .
# A normal install: what runs is what a wheel holds.
RUN /opt/transom/bin/pip install --no-cache-dir . "$TORCH"

FROM debian:bookworm-slim

# g++ compiles the CPU kernels for the machine that the container runs on.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 ca-certificates g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home --home-dir /home/transom transom \
    && install -d -o transom -g transom /fleet

COPY --from=build /opt/transom /opt/transom
ENV PATH=/opt/transom/bin:$PATH PYTHONUNBUFFERED=1

USER transom
WORKDIR /home/transom
ENTRYPOINT ["transom"]
CMD ["up", "--host", "0.0.0.0"]
EXPOSE 8000
