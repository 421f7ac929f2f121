# An image for JobSets (`maxtext launch --to jobset --image ...`):
#   docker build --build-arg EXTRA=tpu -t maxtext .     (or EXTRA=cuda)
FROM python:3.12-slim-bookworm
ARG EXTRA=tpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/maxtext
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install -c constraints.txt ".[${EXTRA},gcs,hf]" && useradd --uid 1000 --create-home maxtext
USER 1000
WORKDIR /home/maxtext
ENTRYPOINT []
CMD ["maxtext", "doctor"]
