"""The one part of the build that pyproject.toml cannot say: an extension that may fail to compile."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "vllm_sparse_refit.codec._kernels",
            ["vllm_sparse_refit/codec/_kernels.c"],
            extra_compile_args=["-O3", "-pthread"],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            # Without a compiler the package installs all the same, and portable.py takes its place.
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
