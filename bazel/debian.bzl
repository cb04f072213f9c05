"""The rules that Bazel's own workspace would download, from Debian's packages and so without network."""

_PACKAGES = {
    "bazel_skylib": "/usr/share/bazel/tools/skylib",
    "platforms": "/usr/share/bazel/tools/platforms",
    "rules_java": "/usr/share/bazel/rules/java",
    "rules_proto": "/usr/share/bazel/rules/proto",
}

def debian_rules():
    for name, path in _PACKAGES.items():
        native.local_repository(name = name, path = path)

    # Debian's rules_cc is too new for Debian's Bazel.
    native.local_repository(name = "rules_cc", path = "bazel/rules_cc")
