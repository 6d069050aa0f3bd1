/* A closed-loop HTTP/1.1 load generator: one thread, epoll, keep-alive, one request in flight per connection.
 *
 * Every connection owns sessions. It opens them (step_kind: start), then ticks through them in turn until the time is up, then
 * ends them. Progress goes to stdout, a word per line; the caller answers "open" with a line on stdin:
 *
 *     open   every session is open, nothing is in flight       begin  the measured window starts
 *     end    it is over; sessions are being ended              {...}  the result, JSON
 *
 * Bodies come from a file of records of equal size and rotate over all requests. --check echo|counter judges every reply;
 * a uniform sample of (index of the body, reply) can be written for a judge that knows more. Counts, latencies and CPU time
 * are those of the window; failures are counted from the first request to the last.
 *
 * For whole services:
 *     --header LINE --start-body TEXT --numbered 1    in every request; of every start; a seq header
 *     --match T      a session is a match of T ticks, then it ends and another one begins under a new id. The bodies are lanes of
 *                    T records: a match sends those of one lane in order, so that recurrent replies can be foretold. The first
 *                    match of a session is shorter, each by another length, so that they do not all end at once
 *     --expected F --versions V    V tables of one reply per body. The replies of a match must be those of one version from its
 *                    first to its last tick; of a match that was begun before the window, of the first version
 *     --rate R       open loop: R ticks per second in all. Their latency counts from the moment at which they were due
 *     --slice S --slice-file F     a histogram per S seconds (see slice_index)
 *     --trace N --trace-file F     every tick of N sessions (struct traced)
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { OPENING_AT_ONCE = 64, EVENTS = 512, HEAD_CAP = 640, SEQ_CAP = 32, NAME_CAP = 64, BUCKETS = 20 * 1000 * 1000, SAMPLE_CAP = 4096 };
enum { PATIENCE_S = 30, MAX_FAILURES = 10000, SLICE_BUCKETS = 2048, MAX_VERSIONS = 32 };
enum check { CHECK_NONE, CHECK_ECHO, CHECK_COUNTER };
enum kind { START, TICK, LEAVE, AGAIN, END, DONE }; /* LEAVE, AGAIN: end and start between two matches */

static struct {
    int port, connections, sessions, cpu, samples;
    long reply_bytes;
    double seconds, warmup;
    size_t body_size;
    enum check check;
    int numbered, versions, trace;
    uint32_t match;
    double rate, slice;
    const char *header, *start_body, *expected, *slice_file, *trace_file;
    const char *prefix, *bodies, *sample_file;
} opt = {.connections = 1, .cpu = -1, .reply_bytes = -1, .seconds = 1, .warmup = 0.3, .prefix = "s", .header = "", .start_body = "", .versions = 1};

typedef struct {
    uint64_t ticks; /* as many as the server must have counted */
    uint64_t seq;
    uint32_t generation, at; /* which match it is, and the tick of it that comes next */
    uint32_t versions;       /* bit by bit: those that would have given all the replies of this match */
    int strayed;
    char head[HEAD_CAP];
    int head_size;
} session;

typedef struct {
    int fd, number; /* owns the sessions number, number + connections, ... */
    enum kind kind; /* of the request in flight, or of the next one */
    int at;         /* the session of that request */
    int waiting;
    uint32_t body; /* index of the request's body */
    uint64_t sent;
    int idle_next; /* in the line of those that wait for their turn (--rate) */
    char *in, *out;
    size_t in_size, in_cap, out_size, out_at, out_cap;
} connection;

typedef struct {
    int status, closes;
    const char *body;
    size_t size, taken; /* taken: bytes of the buffer that the reply occupies */
} reply;

static session *sessions;
static connection *connections;
static char *bodies, *scratch;
static size_t body_count, scratch_cap;
static uint32_t *histogram, next_body;
static int epoll_fd, next_to_open, ready, finished, in_window;
static uint64_t tick_until;
static char *expected;
static int idle_first = -1, idle_last = -1;
static uint64_t next_due, began_at;

typedef struct {
    uint32_t failures, buckets[SLICE_BUCKETS];
} slice;
static slice *slices;
static size_t slice_count;

typedef struct {
    uint32_t session, generation, at, status;
    uint64_t sent, got; /* CLOCK_MONOTONIC, ns */
    char reply[8];
} traced;
static FILE *trace_file;

static struct {
    uint64_t requests, bad_status, wrong, transport, lost, reconnects, latency_sum, latency_max, started, ended, ticks;
    uint64_t differs, strayed, undecided, matches[MAX_VERSIONS];
    int example_status;
    char example[160];
} stats;

typedef struct {
    uint32_t index, size;
    char body[SAMPLE_CAP];
} sample;
static sample *sampled;
static uint64_t seen_by_sampler, random_state = 88172645463325252ull;

static void die(const char *format, ...) {
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    exit(1);
}

static void *must(void *memory) {
    if (!memory) die("out of memory");
    return memory;
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static double cpu_seconds(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static void say(const char *word) {
    puts(word);
    fflush(stdout);
}

/* Exact below 128 µs, then 64 buckets for every power of two. */
static unsigned slice_index(uint64_t us) {
    if (us < 128) return (unsigned)us;
    unsigned e = 63 - (unsigned)__builtin_clzll(us), at = 128 + (e - 7) * 64 + (unsigned)((us >> (e - 6)) & 63);
    return at < SLICE_BUCKETS ? at : SLICE_BUCKETS - 1;
}

static slice *current_slice(uint64_t now) {
    if (!slices || !in_window) return NULL;
    size_t at = (size_t)((double)(now - began_at) / 1e9 / opt.slice);
    return &slices[at < slice_count ? at : slice_count - 1];
}

static void failed(uint64_t *counter, int status, const char *text, size_t size) {
    if (!stats.example[0]) {
        size_t n = size < sizeof stats.example - 1 ? size : sizeof stats.example - 1;
        for (size_t i = 0; i < n; i++) /* it goes into JSON: printable and without quotes */
            stats.example[i] = text[i] < ' ' || text[i] > '~' || text[i] == '"' || text[i] == '\\' ? '.' : text[i];
        if (!n) stats.example[0] = '-';
        stats.example_status = status;
    }
    slice *s = current_slice(now_ns());
    if (s) s->failures++;
    if (++*counter > MAX_FAILURES) die("more than %d failures; the first: %d %s", MAX_FAILURES, stats.example_status, stats.example);
}

/* -- replies --------------------------------------------------------------------------------------------------------------- */

static char *scratch_of(size_t size) {
    if (size > scratch_cap) scratch = must(realloc(scratch, scratch_cap = size * 2));
    return scratch;
}

/* 1: complete, 0: more bytes are needed, -1: not HTTP. `from` is where the chunks begin. */
static int parse_chunks(const char *buffer, size_t size, size_t from, reply *r) {
    char *to = scratch_of(size + 1);
    size_t length = 0;
    for (size_t at = from;;) {
        const char *line_end = memmem(buffer + at, size - at, "\r\n", 2);
        if (!line_end) return 0;
        char *rest;
        unsigned long chunk = strtoul(buffer + at, &rest, 16);
        if (rest == buffer + at || rest > line_end) return -1;
        at = (size_t)(line_end - buffer) + 2;
        if (chunk == 0) {
            if (size < at + 2) return 0;
            if (memcmp(buffer + at, "\r\n", 2) == 0) {
                at += 2;
            } else { /* trailers */
                const char *end = memmem(buffer + at, size - at, "\r\n\r\n", 4);
                if (!end) return 0;
                at = (size_t)(end - buffer) + 4;
            }
            r->body = to, r->size = length, r->taken = at;
            return 1;
        }
        if (size < at + chunk + 2) return 0;
        memcpy(to + length, buffer + at, chunk);
        length += chunk;
        at += chunk + 2;
    }
}

static int header_is(const char *line, size_t size, const char *name, size_t name_size) {
    return size > name_size && line[name_size] == ':' && strncasecmp(line, name, name_size) == 0;
}
#define HEADER_IS(line, size, name) header_is(line, size, name, sizeof name - 1)

/* Parses from scratch whenever bytes arrive: a reply of this benchmark nearly always comes in one piece. */
static int parse(const char *buffer, size_t size, int at_eof, reply *r) {
    size_t skipped = 0;
    for (;;) {
        const char *head_end = memmem(buffer, size, "\r\n\r\n", 4);
        if (!head_end) return 0;
        if (size < 12 || memcmp(buffer, "HTTP/1.", 7) != 0) return -1;
        r->status = atoi(buffer + 9);
        r->closes = buffer[7] == '0';
        long length = -1;
        int chunked = 0;
        const char *line = memchr(buffer, '\n', size);
        for (line++; line < head_end + 2;) {
            const char *end = memchr(line, '\r', (size_t)(head_end - line) + 1);
            size_t n = (size_t)(end - line);
            if (HEADER_IS(line, n, "content-length")) {
                length = strtol(line + 15, NULL, 10);
            } else if (HEADER_IS(line, n, "transfer-encoding")) {
                chunked = memmem(line, n, "hunked", 6) != NULL;
            } else if (HEADER_IS(line, n, "connection")) {
                for (size_t i = 11; i + 5 <= n; i++) r->closes |= strncasecmp(line + i, "close", 5) == 0;
            }
            line = end + 2;
        }
        size_t head_size = (size_t)(head_end - buffer) + 4;
        if (r->status >= 100 && r->status < 200) { /* informational: the reply follows */
            buffer += head_size, size -= head_size, skipped += head_size;
            continue;
        }
        if (chunked) {
            int found = parse_chunks(buffer, size, head_size, r);
            r->taken += skipped;
            return found;
        }
        if (r->status == 204 || r->status == 304) length = 0;
        if (length < 0) { /* delimited by the end of the connection */
            if (!at_eof) return 0;
            r->closes = 1, length = (long)(size - head_size);
        }
        if (size - head_size < (size_t)length) return 0;
        r->body = buffer + head_size, r->size = (size_t)length, r->taken = skipped + head_size + (size_t)length;
        return 1;
    }
}

static void keep_sample(uint32_t index, const reply *r) {
    if (!opt.samples || r->size > SAMPLE_CAP) return;
    uint64_t place = seen_by_sampler++;
    if (place >= (uint64_t)opt.samples) { /* a reservoir: every reply of the window is equally likely to stay */
        random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
        place = random_state % seen_by_sampler;
        if (place >= (uint64_t)opt.samples) return;
    }
    sample *s = &sampled[place];
    s->index = index, s->size = (uint32_t)r->size;
    memcpy(s->body, r->body, r->size);
}

static int is_right(connection *c, const reply *r) {
    if (opt.reply_bytes >= 0 && r->size != (size_t)opt.reply_bytes) return 0;
    if (opt.check == CHECK_ECHO) {
        return r->size == opt.body_size && memcmp(r->body, bodies + (size_t)c->body * opt.body_size, opt.body_size) == 0;
    }
    if (opt.check == CHECK_COUNTER) {
        char expected[NAME_CAP + 32];
        int n = snprintf(expected, sizeof expected, "%s-%d:%" PRIu64, opt.prefix, c->at, sessions[c->at].ticks);
        return r->size == (size_t)n && memcmp(r->body, expected, r->size) == 0;
    }
    return 1;
}

/* Which versions would have said this; a match whose replies no single version explains has strayed. */
static void compare(connection *c, const reply *r) {
    session *s = &sessions[c->at];
    if (s->strayed || r->size != (size_t)opt.reply_bytes) return; /* another size is wrong anyway */
    uint32_t same = 0;
    for (int v = 0; v < opt.versions; v++) {
        const char *right = expected + ((size_t)v * body_count + c->body) * (size_t)opt.reply_bytes;
        if (!memcmp(r->body, right, r->size)) same |= 1u << v;
    }
    if (s->versions & same) {
        s->versions &= same;
    } else {
        stats.differs++;
        if (opt.versions > 1) s->strayed = 1, stats.strayed++;
    }
}

static void match_over(session *s) {
    if (!expected || s->strayed) return;
    if (s->versions & (s->versions - 1)) stats.undecided++;
    else stats.matches[__builtin_ctz(s->versions)]++;
}

static void trace(connection *c, const reply *r, uint64_t now) {
    session *s = &sessions[c->at];
    if (!trace_file || c->at % (opt.sessions / opt.trace)) return;
    traced t = {(uint32_t)c->at, s->generation, s->at - 1, (uint32_t)r->status, c->sent, now, {0}};
    memcpy(t.reply, r->body, r->size < 8 ? r->size : 8);
    fwrite(&t, sizeof t, 1, trace_file);
}

/* -- connections ------------------------------------------------------------------------------------------------------------ */

static void watch(connection *c, int operation, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    if (epoll_ctl(epoll_fd, operation, c->fd, &event)) die("epoll_ctl: %s", strerror(errno));
}

static void dial(connection *c) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)opt.port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0) die("socket: %s", strerror(errno));
    struct timeval patience = {.tv_sec = PATIENCE_S};
    setsockopt(c->fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience); /* bounds connect, too */
    int yes = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address)) die("connect to port %d: %s", opt.port, strerror(errno));
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    c->in_size = c->out_size = c->out_at = 0;
    watch(c, EPOLL_CTL_ADD, EPOLLIN);
}

static void redial(connection *c) {
    close(c->fd); /* which also takes it out of epoll */
    stats.reconnects++;
    dial(c);
}

/* False when the server has closed the connection. */
static int flush(connection *c) {
    while (c->out_at < c->out_size) {
        ssize_t n = send(c->fd, c->out + c->out_at, c->out_size - c->out_at, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) {
            watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
            return 1;
        }
        if (n < 0) return 0;
        c->out_at += (size_t)n;
    }
    return 1;
}

static int compose_head(char *to, int number, const char *kind, size_t body_size) {
    char generation[16] = "";
    if (opt.match) snprintf(generation, sizeof generation, ".%" PRIu32, sessions[number].generation);
    int n = snprintf(to, HEAD_CAP,
                     "POST /step HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nsession: %s-%d%s\r\nstep_kind: %s\r\n%s%s"
                     "Content-Type: application/octet-stream\r\nContent-Length: %zu\r\n%s",
                     opt.port, opt.prefix, number, generation, kind, opt.header, *opt.header ? "\r\n" : "", body_size,
                     opt.numbered ? "seq: " : "\r\n");
    if (n >= HEAD_CAP - SEQ_CAP) die("the prefix or header is too long");
    return n;
}

static size_t put_seq(char *to, session *s) {
    return opt.numbered ? (size_t)sprintf(to, "%" PRIu64 "\r\n\r\n", s->seq++) : 0;
}

static void send_request(connection *c) {
    session *s = &sessions[c->at];
    if (c->kind == TICK) {
        if (opt.match) {
            uint32_t lane = ((uint32_t)c->at + s->generation) % (uint32_t)(body_count / opt.match);
            c->body = lane * opt.match + s->at++;
        } else {
            c->body = next_body;
            next_body = next_body + 1 == body_count ? 0 : next_body + 1;
        }
        memcpy(c->out, s->head, (size_t)s->head_size);
        c->out_size = (size_t)s->head_size;
        c->out_size += put_seq(c->out + c->out_size, s);
        memcpy(c->out + c->out_size, bodies + (size_t)c->body * opt.body_size, opt.body_size);
        c->out_size += opt.body_size;
        s->ticks++;
    } else {
        int starts = c->kind == START || c->kind == AGAIN;
        size_t size = starts ? strlen(opt.start_body) : 0;
        c->out_size = (size_t)compose_head(c->out, c->at, starts ? "start" : "end", size);
        c->out_size += put_seq(c->out + c->out_size, s);
        memcpy(c->out + c->out_size, opt.start_body, size);
        c->out_size += size;
    }
    c->out_at = 0;
    c->waiting = 1;
    c->sent = now_ns();
    if (c->kind == TICK && opt.rate > 0 && next_due < c->sent) c->sent = next_due;
    if (!flush(c)) { /* an idle connection was closed under us: once more on a new one */
        size_t size = c->out_size;
        redial(c);
        c->out_size = size;
        if (!flush(c)) failed(&stats.transport, 0, "send failed", 11);
    }
}

/* -- what comes next ---------------------------------------------------------------------------------------------------- */

static void open_one_more(void) {
    if (next_to_open == opt.connections) return;
    connection *c = &connections[next_to_open++];
    dial(c);
    send_request(c);
}

static uint32_t match_ticks(int number) {
    return sessions[number].generation ? opt.match : 1 + ((uint32_t)number * 2654435761u >> 8) % opt.match;
}

/* Moves to the next session of this connection; true when it was the last. */
static int last_of_round(connection *c) {
    c->at += opt.connections;
    if (c->at < opt.sessions) return 0;
    c->at = c->number;
    return 1;
}

static void finish(connection *c) {
    c->kind = END, c->at = c->number;
    send_request(c);
}

/* Ticks leave when they are due, each by the connection that has waited longest. */
static void send_due(uint64_t now) {
    while (idle_first >= 0 && (now >= next_due || now >= tick_until)) {
        connection *c = &connections[idle_first];
        idle_first = c->idle_next;
        if (now >= tick_until) {
            finish(c);
            continue;
        }
        send_request(c);
        next_due += (uint64_t)(1e9 / opt.rate);
    }
}

static void wait_for_turn(connection *c) {
    c->idle_next = -1;
    if (idle_first < 0) idle_first = c->number;
    else connections[idle_last].idle_next = c->number;
    idle_last = c->number;
}

static void next_match(int number) {
    session *s = &sessions[number];
    s->generation++, s->seq = 0, s->at = 0, s->strayed = 0;
    s->versions = (uint32_t)((1ull << opt.versions) - 1);
    s->head_size = compose_head(s->head, number, "tick", opt.body_size);
}

static void proceed(connection *c, uint64_t now) {
    switch (c->kind) {
    case START:
        stats.started++;
        if (last_of_round(c)) {
            c->kind = TICK;
            ready++;
            open_one_more();
            return;
        }
        break;
    case TICK:
        last_of_round(c);
        if (now >= tick_until) {
            c->kind = END, c->at = c->number;
        } else if (opt.match && sessions[c->at].at == match_ticks(c->at)) {
            c->kind = LEAVE;
        } else if (opt.rate > 0) {
            wait_for_turn(c);
            return;
        }
        break;
    case LEAVE:
        stats.ended++;
        match_over(&sessions[c->at]);
        next_match(c->at);
        c->kind = AGAIN;
        break;
    case AGAIN:
        stats.started++;
        c->kind = TICK;
        if (opt.rate > 0) {
            wait_for_turn(c);
            return;
        }
        break;
    case END:
        stats.ended++;
        match_over(&sessions[c->at]);
        if (last_of_round(c)) {
            c->kind = DONE;
            finished++;
            return;
        }
        break;
    case DONE:
        return;
    }
    send_request(c);
}

static void judge(connection *c, const reply *r, uint64_t now) {
    if (r->status != 200) {
        failed(&stats.bad_status, r->status, r->body, r->size);
    } else if (c->kind == TICK && !is_right(c, r)) {
        failed(&stats.wrong, r->status, r->body, r->size);
    }
    if (c->kind != TICK) return;
    stats.ticks++;
    if (expected && r->status == 200) compare(c, r);
    trace(c, r, now);
    if (!in_window) return;
    uint64_t us = (now - c->sent) / 1000;
    stats.requests++;
    stats.latency_sum += us;
    if (us > stats.latency_max) stats.latency_max = us;
    histogram[us < BUCKETS ? us : BUCKETS - 1]++;
    slice *s = current_slice(now);
    if (s) s->buckets[slice_index(us)]++;
    if (r->status == 200) keep_sample(c->body, r);
}

static void on_reply(connection *c, const reply *r, uint64_t now) {
    c->waiting = 0;
    judge(c, r, now);
    size_t left = c->in_size - r->taken;
    if (left) failed(&stats.wrong, r->status, "bytes after the reply", 21);
    c->in_size = 0;
    if (r->closes) redial(c);
    proceed(c, now);
}

static void on_bytes(connection *c) {
    for (;;) {
        if (c->in_size == c->in_cap) c->in = must(realloc(c->in, c->in_cap *= 2));
        ssize_t n = recv(c->fd, c->in + c->in_size, c->in_cap - c->in_size, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return;
        if (n > 0) c->in_size += (size_t)n;
        uint64_t now = now_ns();
        reply r = {0};
        int found = c->waiting ? parse(c->in, c->in_size, n <= 0, &r) : 0;
        if (found > 0) {
            on_reply(c, &r, now);
            return;
        }
        if (found < 0) die("not an HTTP reply: %.60s", c->in);
        if (n <= 0) { /* closed or reset; an idle connection may be closed, one that waits may not */
            redial(c);
            if (c->waiting) {
                failed(&stats.transport, 0, "closed before the reply", 23);
                c->waiting = 0;
                proceed(c, now);
            }
            return;
        }
        if (c->in_size < c->in_cap) return; /* the socket is empty: epoll will tell */
    }
}

/* Handles events until `until` (ns) or until *counter reaches `goal`. */
static void turn_until(uint64_t until, const int *counter, int goal) {
    struct epoll_event events[EVENTS];
    for (;;) {
        if (counter && *counter >= goal) return;
        uint64_t now = now_ns();
        if (now >= until) return;
        uint64_t left = until - now + 1;
        if (opt.rate > 0) {
            send_due(now);
            if (idle_first >= 0) left = next_due <= now ? 0 : next_due - now < left ? next_due - now : left;
        }
        if (left > 1000000000ull) left = 1000000000ull - 1;
        struct timespec most = {.tv_nsec = (long)left};
        int n = epoll_pwait2(epoll_fd, events, EVENTS, &most, NULL);
        if (n < 0 && errno != EINTR) die("epoll_wait: %s", strerror(errno));
        for (int i = 0; i < n; i++) {
            connection *c = events[i].data.ptr;
            if (events[i].events & EPOLLOUT) {
                watch(c, EPOLL_CTL_MOD, EPOLLIN);
                if (!flush(c)) continue; /* the reading side will find it closed */
            }
            if (events[i].events & ~(uint32_t)EPOLLOUT) on_bytes(c);
        }
    }
}

/* -- the run ------------------------------------------------------------------------------------------------------------- */

static uint64_t percentile(double share) {
    uint64_t rank = (uint64_t)(share * (double)stats.requests), sum = 0;
    for (int us = 0; us < BUCKETS; us++)
        if ((sum += histogram[us]) > rank) return (uint64_t)us;
    return 0;
}

static char *read_records(const char *path, size_t record, size_t *count) {
    FILE *file = fopen(path, "rb");
    if (!file) die("%s: %s", path, strerror(errno));
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    if (!record || size <= 0 || (size_t)size % record) die("%s: not a multiple of %zu bytes", path, record);
    *count = (size_t)size / record;
    char *records = must(malloc((size_t)size));
    if (fread(records, 1, (size_t)size, file) != (size_t)size) die("%s: short read", path);
    fclose(file);
    return records;
}

static void read_expected(void) {
    size_t count;
    if (opt.reply_bytes <= 0) die("--expected needs --reply-bytes");
    if (opt.versions < 1 || opt.versions > MAX_VERSIONS) die("--versions is 1 to %d", MAX_VERSIONS);
    expected = read_records(opt.expected, (size_t)opt.reply_bytes, &count);
    if (count != body_count * (size_t)opt.versions) die("%s: not one reply per body and version", opt.expected);
}

static void write_slices(void) {
    FILE *file = fopen(opt.slice_file, "wb");
    if (!file) die("%s: %s", opt.slice_file, strerror(errno));
    fwrite(slices, sizeof *slices, slice_count, file);
    if (fclose(file)) die("%s: %s", opt.slice_file, strerror(errno));
}

static void write_samples(void) {
    FILE *file = fopen(opt.sample_file, "wb");
    if (!file) die("%s: %s", opt.sample_file, strerror(errno));
    uint64_t count = seen_by_sampler < (uint64_t)opt.samples ? seen_by_sampler : (uint64_t)opt.samples;
    for (uint64_t i = 0; i < count; i++) fwrite(&sampled[i], 1, 8 + sampled[i].size, file);
    if (fclose(file)) die("%s: %s", opt.sample_file, strerror(errno));
}

static void parse_options(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (!strcmp(name, "--port")) opt.port = atoi(value);
        else if (!strcmp(name, "--connections")) opt.connections = atoi(value);
        else if (!strcmp(name, "--sessions")) opt.sessions = atoi(value);
        else if (!strcmp(name, "--cpu")) opt.cpu = atoi(value);
        else if (!strcmp(name, "--samples")) opt.samples = atoi(value);
        else if (!strcmp(name, "--reply-bytes")) opt.reply_bytes = atol(value);
        else if (!strcmp(name, "--seconds")) opt.seconds = atof(value);
        else if (!strcmp(name, "--warmup")) opt.warmup = atof(value);
        else if (!strcmp(name, "--body-size")) opt.body_size = (size_t)atol(value);
        else if (!strcmp(name, "--bodies")) opt.bodies = value;
        else if (!strcmp(name, "--sample-file")) opt.sample_file = value;
        else if (!strcmp(name, "--prefix")) opt.prefix = value;
        else if (!strcmp(name, "--header")) opt.header = value;
        else if (!strcmp(name, "--start-body")) opt.start_body = value;
        else if (!strcmp(name, "--numbered")) opt.numbered = atoi(value);
        else if (!strcmp(name, "--match")) opt.match = (uint32_t)atol(value);
        else if (!strcmp(name, "--expected")) opt.expected = value;
        else if (!strcmp(name, "--versions")) opt.versions = atoi(value);
        else if (!strcmp(name, "--rate")) opt.rate = atof(value);
        else if (!strcmp(name, "--slice")) opt.slice = atof(value);
        else if (!strcmp(name, "--slice-file")) opt.slice_file = value;
        else if (!strcmp(name, "--trace")) opt.trace = atoi(value);
        else if (!strcmp(name, "--trace-file")) opt.trace_file = value;
        else if (!strcmp(name, "--check"))
            opt.check = !strcmp(value, "echo") ? CHECK_ECHO : !strcmp(value, "counter") ? CHECK_COUNTER : CHECK_NONE;
        else die("unknown option %s", name);
    }
    if (argc % 2 == 0) die("an option without a value");
    if (!opt.sessions) opt.sessions = opt.connections;
    if (!opt.port || !opt.bodies || opt.connections < 1 || opt.sessions < opt.connections)
        die("needs --port, --bodies, sessions >= connections >= 1");
    if (strlen(opt.prefix) > NAME_CAP - 16) die("--prefix is too long");
}

static void prepare(void) {
    if (opt.cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET((size_t)opt.cpu, &set);
        if (sched_setaffinity(0, sizeof set, &set)) die("--cpu %d: %s", opt.cpu, strerror(errno));
    }
    bodies = read_records(opt.bodies, opt.body_size, &body_count);
    if (opt.match && (body_count % opt.match || !body_count)) die("%s: not a multiple of --match", opt.bodies);
    if (opt.expected) read_expected();
    if (opt.slice > 0 && opt.slice_file) {
        slice_count = (size_t)(opt.seconds / opt.slice + 0.999);
        slices = must(calloc(slice_count, sizeof *slices));
    }
    if (opt.trace > opt.sessions) opt.trace = opt.sessions;
    if (opt.trace > 0 && opt.trace_file && !(trace_file = fopen(opt.trace_file, "wb"))) die("%s: %s", opt.trace_file, strerror(errno));
    histogram = must(calloc(BUCKETS, sizeof *histogram)); /* pages nobody touches cost nothing */
    sessions = must(calloc((size_t)opt.sessions, sizeof *sessions));
    connections = must(calloc((size_t)opt.connections, sizeof *connections));
    if (opt.samples) sampled = must(calloc((size_t)opt.samples, sizeof *sampled));
    for (int i = 0; i < opt.sessions; i++) {
        sessions[i].versions = 1; /* there is only one as yet */
        sessions[i].head_size = compose_head(sessions[i].head, i, "tick", opt.body_size);
    }
    for (int i = 0; i < opt.connections; i++) {
        connection *c = &connections[i];
        c->number = c->at = i;
        c->in = must(malloc(c->in_cap = 2048));
        c->out = must(malloc(c->out_cap = HEAD_CAP + (opt.body_size > strlen(opt.start_body) ? opt.body_size : strlen(opt.start_body))));
    }
    if ((epoll_fd = epoll_create1(EPOLL_CLOEXEC)) < 0) die("epoll_create1: %s", strerror(errno));
}

static void open_sessions(void) {
    for (int i = 0; i < OPENING_AT_ONCE; i++) open_one_more();
    turn_until(now_ns() + PATIENCE_S * 1000000000ull, &ready, opt.connections);
    if (ready < opt.connections) die("only %d of %d connections were answered in %d s", ready, opt.connections, PATIENCE_S);
    say("open");
    char line[16];
    if (!fgets(line, sizeof line, stdin)) die("nobody said go");
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    prepare();
    open_sessions();

    uint64_t begin = now_ns() + (uint64_t)(opt.warmup * 1e9);
    tick_until = begin + (uint64_t)(opt.seconds * 1e9);
    next_due = now_ns();
    for (int i = 0; i < opt.connections; i++) {
        if (opt.rate > 0) wait_for_turn(&connections[i]);
        else send_request(&connections[i]);
    }
    turn_until(begin, NULL, 0);
    say("begin");
    double cpu = cpu_seconds();
    began_at = now_ns();
    in_window = 1;
    turn_until(tick_until, NULL, 0);
    double window = (double)(now_ns() - began_at) / 1e9;
    cpu = cpu_seconds() - cpu;
    in_window = 0;
    say("end");
    if (opt.rate > 0) send_due(now_ns());

    turn_until(now_ns() + PATIENCE_S * 1000000000ull, &finished, opt.connections);
    for (int i = 0; i < opt.connections; i++) stats.lost += connections[i].kind != DONE;
    if (opt.sample_file) write_samples();
    if (slices) write_slices();
    if (trace_file && fclose(trace_file)) die("%s: %s", opt.trace_file, strerror(errno));
    printf("{\"requests\": %" PRIu64 ", \"window_s\": %.6f, \"p50_us\": %" PRIu64 ", \"p90_us\": %" PRIu64 ", \"p99_us\": %" PRIu64
           ", \"max_us\": %" PRIu64 ", \"mean_us\": %.1f, \"bad_status\": %" PRIu64 ", \"wrong\": %" PRIu64
           ", \"transport\": %" PRIu64 ", \"lost\": %" PRIu64 ", \"reconnects\": %" PRIu64 ", \"started\": %" PRIu64
           ", \"ended\": %" PRIu64 ", \"ticks\": %" PRIu64 ", \"cpu_s\": %.6f, \"differs\": %" PRIu64 ", \"strayed\": %" PRIu64
           ", \"undecided\": %" PRIu64 ", \"example_status\": %d, \"example\": \"%s\", \"matches\": [",
           stats.requests, window, percentile(0.5), percentile(0.9), percentile(0.99), stats.latency_max,
           stats.requests ? (double)stats.latency_sum / (double)stats.requests : 0.0, stats.bad_status, stats.wrong,
           stats.transport, stats.lost, stats.reconnects, stats.started, stats.ended, stats.ticks, cpu, stats.differs, stats.strayed, stats.undecided, stats.example_status, stats.example);
    for (int v = 0; v < opt.versions; v++) printf("%s%" PRIu64, v ? ", " : "", stats.matches[v]);
    puts("]}");
    return 0;
}
