/* An allocator that finds writes to memory which is not the writer's: preload it, with
 * PYTHONMALLOC=malloc. A pattern follows each block, and is looked at when the block is freed. A
 * freed block is filled with a pattern, waits in a queue, and is looked at before it is given out
 * again; those that wait still, when the process ends. What differs ends the process with a message.
 */
#define _GNU_SOURCE
#include <execinfo.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { ALIVE = 0x5afe5afe, FREED = 0x0ddba11, AFTER = 0xfd, GONE = 0xa5, BEYOND = 32 };
enum { MOST_BLOCKS = 1 << 19, MOST_BYTES = 1 << 28, LARGE = 1 << 22 };

typedef struct { uint32_t mark, pad; size_t size; void *base, *unused; } Head; /* before a block */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Head *queue[MOST_BLOCKS];
static size_t first, count, waiting;

static void end(const char *what, Head *head) {
    char text[160];
    void *frames[48];
    int n = snprintf(text, sizeof text, "heap_guard: %s (block of %zu bytes)\n", what, head->size);
    if (write(2, text, n) == n) backtrace_symbols_fd(frames, backtrace(frames, 48), 2);
    abort();
}

static int differs(const unsigned char *from, size_t size, unsigned char pattern) {
    return size && (*from != pattern || memcmp(from, from + 1, size - 1));
}

static void *given(size_t alignment, size_t size) {
    if (alignment < 64) alignment = 64;
    if (size > SIZE_MAX / 2) return NULL;
    char *base = __libc_memalign(alignment, alignment + size + BEYOND);
    if (!base) return NULL;
    Head *head = (Head *)(base + alignment) - 1;
    *head = (Head){ALIVE, 0, size, base, NULL};
    memset(base + alignment + size, AFTER, BEYOND);
    return base + alignment;
}

static void check(Head *head) {
    if (head->mark != FREED || differs((unsigned char *)(head + 1), head->size, GONE))
        end("a write to freed memory", head);
}

void free(void *block) {
    if (!block) return;
    Head *head = (Head *)block - 1;
    if (head->mark == FREED) end("freed twice", head);
    if (head->mark != ALIVE) end("freed, and never given out", head);
    if (differs((unsigned char *)block + head->size, BEYOND, AFTER)) end("a write past the end", head);
    head->mark = FREED;
    if (head->size > LARGE) { __libc_free(head->base); return; }
    memset(block, GONE, head->size);
    pthread_mutex_lock(&lock);
    while (count == MOST_BLOCKS || (count && waiting + head->size > MOST_BYTES)) {
        Head *oldest = queue[first];
        first = (first + 1) % MOST_BLOCKS, count--, waiting -= oldest->size;
        pthread_mutex_unlock(&lock); /* a message takes memory */
        check(oldest);
        __libc_free(oldest->base);
        pthread_mutex_lock(&lock);
    }
    queue[(first + count++) % MOST_BLOCKS] = head, waiting += head->size;
    pthread_mutex_unlock(&lock);
}

__attribute__((destructor)) static void finish(void) {
    for (size_t n = 0; n < count; n++) check(queue[(first + n) % MOST_BLOCKS]);
}

void *malloc(size_t size) { return given(0, size); }
void *memalign(size_t alignment, size_t size) { return given(alignment, size); }
void *aligned_alloc(size_t alignment, size_t size) { return given(alignment, size); }
void *valloc(size_t size) { return given(4096, size); }
size_t malloc_usable_size(void *block) { return block ? ((Head *)block - 1)->size : 0; }

int posix_memalign(void **place, size_t alignment, size_t size) {
    return (*place = given(alignment, size)) ? 0 : 12;
}

void *calloc(size_t number, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(number, size, &bytes)) return NULL;
    void *block = given(0, bytes);
    return block ? memset(block, 0, bytes) : NULL;
}

void *realloc(void *block, size_t size) {
    if (!block) return malloc(size);
    size_t before = malloc_usable_size(block);
    void *moved = malloc(size);
    if (!moved) return NULL;
    memcpy(moved, block, before < size ? before : size);
    free(block);
    return moved;
}
