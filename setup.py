"""Builds the native kernels: one library for every Python and PyTorch, with the kernels in several instruction sets.

They are optional. Where there is no compiler, or it cannot compile them, the package is installed without them, and
`torchcaps.ops.backends()` says why.
"""

import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("torchcaps/ops/native")
# Vector extensions of GCC and Clang are the only ones that the kernels need. Nothing may be reordered that changes
# what a NaN does.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-ffp-contract=fast", "-Wno-psabi"]


def instruction_sets() -> dict[str, tuple[int, list[str]]]:
    """Bytes of a vector and the compiler's options for each set."""
    if platform.machine() in ("x86_64", "AMD64"):
        return {
            "baseline": (16, []),
            "avx2": (32, ["-march=x86-64-v3"]),
            "avx512": (64, ["-march=x86-64-v4", "-mprefer-vector-width=512"]),
        }
    return {"baseline": (16, [])}


class BuildKernels(build_ext):
    def get_ext_filename(self, name: str) -> str:
        return str(Path(*name.split("."))) + ".so"  # of no particular Python

    def build_extension(self, extension: Extension) -> None:
        reason = Path(self.get_ext_fullpath(extension.name)).with_name("why_not.txt")
        reason.unlink(missing_ok=True)
        try:
            self.compile_and_link(extension)
        except Exception as error:
            message = str(error).strip().splitlines()
            reason.parent.mkdir(parents=True, exist_ok=True)
            reason.write_text(message[-1] if message else type(error).__name__)
            raise

    def compile_and_link(self, extension: Extension) -> None:
        sets = instruction_sets()
        extra = os.environ.get("TORCHCAPS_NATIVE_FLAGS", "").split()  # sanitizers, for tests
        objects = []
        for name, (width, flags) in sets.items():
            objects += self.compiler.compile(
                [str(FOLDER / "kernels.cpp")],
                output_dir=str(Path(self.build_temp) / name),
                macros=[("INSTRUCTIONS", name), ("VECTOR_BYTES", str(width))],
                extra_postargs=FLAGS + flags + extra,
                depends=extension.depends,
            )
        objects += self.compiler.compile(
            [str(FOLDER / "library.cpp")],
            output_dir=self.build_temp,
            macros=[(f"HAS_{name.upper()}", None) for name in sets],
            extra_postargs=FLAGS + extra,
            depends=extension.depends,
        )
        target = self.get_ext_fullpath(extension.name)
        self.compiler.link_shared_object(
            objects, target, extra_postargs=["-pthread", *extra], target_lang="c++", build_temp=self.build_temp
        )


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "torchcaps.ops.native.kernels",
            [str(FOLDER / "kernels.cpp"), str(FOLDER / "library.cpp")],
            depends=[str(path) for path in FOLDER.glob("*.h")],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
