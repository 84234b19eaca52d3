# An image of hce with the CPU build of torch. The index is in the volume /data; see docs/guide.md.
FROM python:3.12-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /build
COPY pyproject.toml constraints.txt MANIFEST.in README.md CHANGELOG.md LICENSE ./
COPY src src
# torch first and alone, from the index with CPU builds, so that no other package pulls in CUDA.
RUN python -m venv /opt/hce \
    && /opt/hce/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple \
        "$(grep '^torch==' constraints.txt)" \
    && /opt/hce/bin/pip install --no-cache-dir -c constraints.txt '.[bundled,mcp,milvus,web]'

FROM python:3.12-slim
COPY --from=build /opt/hce /opt/hce
RUN useradd --create-home --uid 1000 hce && install --directory --owner=hce --group=hce /data
USER 1000
WORKDIR /home/hce
# What an index may contact is written down in HCE_CONFIG, which has to outlive the container.
ENV PATH=/opt/hce/bin:$PATH HCE_CONFIG=/data/settings
VOLUME /data
EXPOSE 8080
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/ready', timeout=8)"]
ENTRYPOINT ["hce"]
CMD ["serve", "/data/index", "--host", "0.0.0.0"]
