"""Build of the native kernels: one library for all versions of Python and PyTorch, with several instruction sets.

The kernels are optional. If there is no compiler, or it fails, the package is installed without them, and
`torchcaps.ops.backends()` says why.

TORCHCAPS_NATIVE=here builds them for the processor of this machine alone, which is quicker. TORCHCAPS_NATIVE=built
builds none: the Makefile does that while pip downloads.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.modified import newer_group

FOLDER = Path("torchcaps/ops/native")
NOTE = "why_not.txt"  # file that says why there is no library
# The kernels need only the vector extensions of GCC and Clang. No flag may change what happens to a NaN, as -ffast-math
# does.
FLAGS = ["-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-ffp-contract=fast", "-Wno-psabi"]


def instruction_sets() -> dict[str, tuple[int, list[str]]]:
    """Return bytes of a vector and options of the compiler for each instruction set of the platform that is built for,
    which need not be this machine's."""
    if sysconfig.get_platform().endswith(("x86_64", "amd64")):
        return {
            "avx512": (64, ["-march=x86-64-v4"]),  # takes as long as the others together
            "avx2": (32, ["-march=x86-64-v3"]),
            "baseline": (16, []),
        }
    return {"baseline": (16, [])}


def best_here(compiler: list[str], sets: dict[str, tuple[int, list[str]]]) -> dict[str, tuple[int, list[str]]]:
    """Return the instruction sets without those that this machine lacks or has something better than."""
    command = [*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    best = "avx512" if "__AVX512VL__" in macros else "avx2" if "__AVX2__" in macros else "baseline"
    return {name: sets[name] for name in sets if name in (best, "baseline")}


class BuildModules(build_py):
    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # modules and recipes of an earlier commit would stay
        super().run()


class BuildKernels(build_ext):
    def get_ext_filename(self, name: str) -> str:
        return str(Path(*name.split("."))) + ".so"  # without the tag of a Python version

    def build_extension(self, extension: Extension) -> None:
        note = Path(self.build_lib) / FOLDER / NOTE
        note.unlink(missing_ok=True)
        try:
            self.compile_and_link(extension)
        except Exception:
            note.parent.mkdir(parents=True, exist_ok=True)
            Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)  # left by an earlier build
            compiler = (getattr(self.compiler, "compiler_cxx", None) or ["cl"])[0]  # Microsoft's has no such attribute
            what = (
                "could not compile them: they need GCC 12 or later, or Clang (pip install -v says more)"
                if shutil.which(compiler)
                else "is not installed"
            )
            note.write_text(f"the C++ compiler {compiler} {what}")
            raise

    def compile_and_link(self, extension: Extension) -> None:
        extra = os.environ.get("TORCHCAPS_NATIVE_FLAGS", "").split()  # such as sanitizers, for tests
        sets = instruction_sets()
        if os.environ.get("TORCHCAPS_NATIVE") == "here":
            sets = best_here(self.compiler.compiler_cxx[:1], sets)
        source, needed = str(FOLDER / "kernels.cpp"), ["setup.py", *extension.sources, *extension.depends]

        def compiled(name: str) -> list[str]:
            width, flags = sets[name]
            folder = str(Path(self.build_temp) / name)
            (before,) = self.compiler.object_filenames([source], output_dir=folder)
            if not extra and not newer_group(needed, before):
                return [before]
            return self.compiler.compile(
                [source],
                output_dir=folder,
                macros=[("INSTRUCTIONS", name), ("VECTOR_BYTES", str(width))],
                extra_postargs=FLAGS + flags + extra,
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [name for found in pool.map(compiled, sets) for name in found]
        objects += self.compiler.compile(
            [str(FOLDER / "library.cpp")],
            output_dir=self.build_temp,
            macros=[(f"HAS_{name.upper()}", "1") for name in sets],
            extra_postargs=FLAGS + extra,
        )
        target = self.get_ext_fullpath(extension.name)
        self.compiler.link_shared_object(
            objects, target, extra_postargs=["-pthread", *extra], target_lang="c++", build_temp=self.build_temp
        )

    def copy_extensions_to_source(self) -> None:  # called in editable installations
        super().copy_extensions_to_source()
        note = Path(self.build_lib) / FOLDER / NOTE
        (FOLDER / NOTE).unlink(missing_ok=True)
        if note.exists():
            (FOLDER / NOTE).write_text(note.read_text())
            (FOLDER / "kernels.so").unlink(missing_ok=True)  # left by an earlier build


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        built = (Path(self.bdist_dir) / FOLDER / "kernels.so").exists()
        return "py3", "none", super().get_tag()[2] if built else "any"


def readme() -> str:
    """Return the README for the package index, where links and pictures need whole addresses."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", r"\1https://raw.githubusercontent.com/torchcaps/torchcaps/main/", text)
    return re.sub(r"(\]\()(?!https?:|#)", r"\1https://github.com/torchcaps/torchcaps/blob/main/", text)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[]
    if os.environ.get("TORCHCAPS_NATIVE") == "built"
    else [
        Extension(
            "torchcaps.ops.native.kernels",
            [str(FOLDER / "kernels.cpp"), str(FOLDER / "library.cpp")],
            depends=[str(path) for path in FOLDER.glob("*.h")],
            optional=True,
        )
    ],
    cmdclass={"build_py": BuildModules, "build_ext": BuildKernels, "bdist_wheel": Wheel},
)
