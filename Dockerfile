# libfsdp on Debian 12: the library, its tests and examples, and the Python package, built. With docker, podman or buildah:
#   docker build -t libfsdp .              # --build-arg PIP_INDEX_URL=... for another index than pip's own
#   docker run --rm libfsdp                # trains a small GPT on two ranks
#   docker run --rm libfsdp make test
FROM docker.io/library/debian:12
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends ca-certificates make python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /libfsdp
COPY . .
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN make build
CMD ["make", "train"]
