#!/usr/bin/env bash
# ARM's kernels on a bare Debian 12: `set_up.sh FOLDER EXECUTORCH_VERSION [SOURCE...]`, as root, about two minutes.
#
# FOLDER gets the aarch64 wheels of ExecuTorch, LiteRT and ONNX Runtime, an arm64 Python, and a root for qemu-user with
# one made-up Cortex-A76; then the client, the plugin that counts instructions, and a clock. What is there stays. Sources
# are linked into the client: kernels and backends of your own.
set -euo pipefail

litert=2.3.0 onnxruntime=1.32.0 python=3.11
sources=$(cd "$(dirname "$0")" && pwd)
folder=$(mkdir -p "$1" && cd "$1" && pwd)
version=$2
own=()
for source in "${@:3}"; do own+=("$(realpath "$source")"); done
root=$folder/root executorch=$folder/executorch-$version
cd "$folder"

install_packages() {
  command -v qemu-aarch64 aarch64-linux-gnu-g++ gcc unzip >/dev/null && dpkg --print-foreign-architectures | grep -qx arm64 && return
  dpkg --add-architecture arm64
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq gcc libc6-dev g++-aarch64-linux-gnu qemu-user unzip >apt.log 2>&1
}

# wheels INTO PACKAGE...: downloads the packages for aarch64, without what they depend on, and unpacks them.
wheels() {
  local into=$1 platform platforms=()
  [ -d "$into" ] && return
  for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do platforms+=(--platform "${platform}_aarch64"); done
  shift
  python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --python-version "$python" \
    "${platforms[@]}" -d "wheels-$(basename "$into")" "$@"
  mkdir -p "$into"
  for wheel in "wheels-$(basename "$into")"/*.whl; do unzip -q -o "$wheel" -d "$into"; done
}

# The libraries that qemu gives to the programs, and a Python.
make_root() {
  [ -d "$root" ] && return
  mkdir -p debs "$root"
  (cd debs && apt-get download -qq $(printf '%s:arm64 ' "python$python-minimal" "libpython$python-minimal" \
    "libpython$python-stdlib" libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5))
  for package in debs/*.deb; do dpkg -x "$package" "$root"; done
}

# What the runtimes read to choose their kernels. Without it they read of the machine below, and some of them crash.
# It is one CPU: with two, a thread of ExecuTorch's pool would make the count inexact.
make_cpu() {
  local cpus=$root/sys/devices/system/cpu one
  one=$cpus/cpu0
  mkdir -p "$root/proc" "$one/cpufreq" "$one/topology" "$one/regs/identification"
  cat >"$root/proc/cpuinfo" <<END
processor	: 0
BogoMIPS	: 100.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x4
CPU part	: 0xd0b
CPU revision	: 1

END
  for list in possible present online; do echo 0 >"$cpus/$list"; done
  echo 0 >"$cpus/kernel_max"
  echo 0x00000000414fd0b1 >"$one/regs/identification/midr_el1"
  echo 2000000 >"$one/cpufreq/cpuinfo_max_freq"
  echo 0 >"$one/topology/physical_package_id"
  echo 1 >"$one/topology/core_siblings"
  echo 0 >"$one/topology/core_siblings_list"
}

compile() {
  local headers=$executorch/executorch/include libraries=$executorch/executorch/lib
  gcc -O1 -shared -fPIC "$sources/counter.c" -o counter.so
  aarch64-linux-gnu-gcc -O1 -shared -fPIC "$sources/clock.c" -o clock.so
  aarch64-linux-gnu-g++ -O1 -w -std=c++17 -DC10_USING_CUSTOM_GENERATED_MACROS -I"$headers" \
    -I"$headers/executorch/runtime/core/portable_type/c10" "$sources/client.cpp" "${own[@]}" -o client \
    -Wl,--no-as-needed,--allow-shlib-undefined -L"$libraries" -Wl,-rpath,"$libraries" -lexecutorch -lexecutorch_etdump \
    -lexecutorch_backend_xnnpack -lexecutorch_kernels_optimized -lexecutorch_kernels_quantized -lexecutorch_threadpool
}

install_packages
wheels "$executorch" "executorch==$version"
site=$folder/site-$litert-$onnxruntime
wheels "$site" "ai-edge-litert==$litert" "onnxruntime==$onnxruntime" "numpy>=2,<2.4" packaging flatbuffers \
  protobuf typing_extensions backports.strenum tqdm
ln -sfn "$site" "$folder/site"
make_root
make_cpu
compile
