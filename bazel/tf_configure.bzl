"""Makes the TensorFlow that is installed in a Python a repository that C++ rules can depend on."""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    # The linker would look for it by -l; the loader finds the one that Python has loaded.
    srcs = ["libtensorflow_framework.so.2"],
    includes = ["include"],
)
"""

def _tf_configure_impl(ctx):
    python = ctx.os.environ.get("PYTHON_BIN_PATH")
    if not python:
        fail("PYTHON_BIN_PATH must be a Python that has TensorFlow; `make bazel` sets it to .venv")
    script = ctx.path(Label("//:tools/tensorflow_build.py"))
    result = ctx.execute([python, script])
    if result.return_code:
        fail(result.stderr)
    build = json.decode(result.stdout)
    result = ctx.execute([python, ctx.path(Label("//:tools/cxx.py"))])
    if result.return_code:
        fail(result.stderr)
    cuda = json.decode(result.stdout)

    ctx.symlink(build["include"], "include")
    library = "libtensorflow_framework.so.2"
    ctx.symlink(build["library"] + "/" + library, library)
    ctx.file("BUILD", _BUILD)
    ctx.file("build.bzl", "TENSORFLOW = %r\nCUDA = %r\nPORTABLE = %r\nMACHINE = %r\n" % (
        build,
        cuda,
        ctx.os.environ.get("HET_TF_PORTABLE") == "1",
        ctx.execute(["uname", "-m"]).stdout.strip(),
    ))

tf_configure = repository_rule(
    implementation = _tf_configure_impl,
    environ = ["PYTHON_BIN_PATH", "HET_TF_PORTABLE", "HET_TF_CUDA"],
    local = True,
)
