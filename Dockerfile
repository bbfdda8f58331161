# Images of the server.
#
#   docker build --target cpu -t bifolio .               the CPU kernels of this architecture, all instruction sets inside
#   docker build --target cuda -t bifolio:cuda .         torch and Triton; run it with --gpus all
#   docker run -p 8000:8000 bifolio serve --host 0.0.0.0 --api-key "$KEY"
#
# Models are fetched into /models (a volume): docker run -v models:/models bifolio pull smollm2

FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY native native
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm AS cpu
COPY --from=build /wheels /wheels
# tokenizers requires the last packages for its own downloads, which bifolio does not use.
RUN wheel="$(ls /wheels/bifolio-*.whl)" && pip install --no-cache-dir "$wheel[serve]" && rm -rf /wheels \
    && pip uninstall -y huggingface_hub hf-xet fsspec \
    && useradd --create-home bifolio && mkdir /models && chown bifolio /models
ENV BIFOLIO_CACHE=/models
VOLUME /models
USER bifolio
WORKDIR /home/bifolio
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["bifolio"]
CMD ["serve", "--host", "0.0.0.0"]

FROM cpu AS cuda
USER root
# Triton compiles the launcher of each kernel with the C compiler when it is first used.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir 'torch>=2.11,<2.14'
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER bifolio
