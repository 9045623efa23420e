# Debian 12 with libfsdp, its Python package and the programs train_gpt and train_gpt.py. With docker, podman or buildah:
#   docker build -t libfsdp .              # --build-arg PIP_INDEX_URL=... for another index than pip's own
#   docker run --rm libfsdp                # trains a small GPT on two ranks
#   docker run --rm libfsdp make test      # builds and runs all tests
FROM docker.io/library/debian:12
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends ca-certificates make python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /libfsdp
COPY . .
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# With --help, both targets build what they would run.
RUN make train ARGS=--help && make train-python ARGS=--help
ENV PATH=/libfsdp/.venv/bin:$PATH PYTHONPATH=/libfsdp/build/python
CMD ["make", "train"]
