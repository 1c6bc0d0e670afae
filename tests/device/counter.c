// A plugin of qemu-user that counts the instructions of a program, and tells the program how many it has executed.
//
// qemu translates a program block by block: each block that begins adds its instructions to the count. The plugin lives
// in the process of the program, so it can write the count where a system call (clock.h) says.
#include "clock.h"
#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

// What is used of qemu-plugin.h, version 1 of its interface, which Debian does not package.
typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
typedef void (*translated_t)(qemu_plugin_id_t, struct qemu_plugin_tb *);
typedef void (*called_t)(qemu_plugin_id_t, unsigned, int64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                         uint64_t, uint64_t);
typedef void (*ended_t)(qemu_plugin_id_t, void *);
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, translated_t);
void qemu_plugin_register_vcpu_syscall_cb(qemu_plugin_id_t, called_t);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, ended_t, void *);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, enum qemu_plugin_op, void *, uint64_t);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);
void *qemu_plugin_insn_haddr(const struct qemu_plugin_insn *);

#define EXPORTED __attribute__((visibility("default")))
EXPORTED int qemu_plugin_version = 1;

static uint64_t count;
static intptr_t base;  // where the program's address 0 is

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *block) {
  struct qemu_plugin_insn *first = qemu_plugin_tb_get_insn(block, 0);
  (void)id;
  base = (intptr_t)qemu_plugin_insn_haddr(first) - (intptr_t)qemu_plugin_insn_vaddr(first);
  qemu_plugin_register_vcpu_tb_exec_inline(block, QEMU_PLUGIN_INLINE_ADD_U64, &count, qemu_plugin_tb_n_insns(block));
}

static void called(qemu_plugin_id_t id, unsigned cpu, int64_t number, uint64_t to, uint64_t b, uint64_t c, uint64_t d,
                   uint64_t e, uint64_t f, uint64_t g, uint64_t h) {
  (void)id, (void)cpu, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)h;
  if (number == COUNTER_CALL) *(uint64_t *)(base + (intptr_t)to) = count;
}

static void ended(qemu_plugin_id_t id, void *unused) {
  (void)id, (void)unused;
  fprintf(stderr, "%" PRIu64 " instructions\n", count);
}

EXPORTED int qemu_plugin_install(qemu_plugin_id_t id, const void *about, int number, char **words) {
  (void)about, (void)number, (void)words;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_vcpu_syscall_cb(id, called);
  qemu_plugin_register_atexit_cb(id, ended, NULL);
  return 0;
}
