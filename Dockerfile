# docker build -t diffsynth_lite .
#     With `--build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` torch is its CPU build, a tenth of the size.
# docker run --rm diffsynth_lite
#     The quickstart, on a CPU.
# docker run --rm -it --gpus all --ipc=host -e HF_HOME=/hub -v ~/.cache/huggingface:/hub -v "$PWD:/work" -w /work \
#     diffsynth_lite diffsynth-lite train --config mine.yaml
#     Your own files, with the GPUs (this needs NVIDIA's container toolkit).
FROM python:3.12-slim

ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_EXTRA_INDEX_URL=$PIP_EXTRA_INDEX_URL PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

WORKDIR /diffsynth_lite

# Before the sources, so that a change of these leaves the layer with torch as it is.
COPY constraints.txt ./
RUN python -m venv .venv && .venv/bin/python -m pip install -c constraints.txt torch

COPY . .
RUN bash -c "source scripts/environment.sh && prepare_environment"

ENV PATH=/diffsynth_lite/.venv/bin:$PATH
CMD ["bash", "scripts/quickstart.sh"]
