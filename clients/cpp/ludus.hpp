// Ludus client for games (docs/protocol.md) in one header. Needs only C++11 and sockets.
//
//     ludus::Options options("127.0.0.1", 8000);
//     options.deadline_ms = 30;
//     options.fallback = ludus::Fallback::Repeat;
//     options.default_body = nothing;                       // until there is a reply to repeat
//     ludus::Client client(options);
//     ludus::Session session;                               // or session("match-17")
//     ludus::Reply reply;
//     if (!client.start(session, "", reply)) return fail(reply.message);
//     while (playing && client.tick(session, observe(), reply)) apply(reply.body);
//     client.end(session, "", reply);
//
// A tick has a deadline. If it is missed, the game gets the fallback and continues; reply.missed and session.missed() report it, and
// the next tick synchronises with the server again. start and end retry until timeout_ms. Every request is numbered: a request that is
// sent twice counts once, and a reply is never mistaken for that of another request.
//
// Nothing throws (it compiles with -fno-exceptions -fno-rtti) and there is no global state. Use a client from one thread at a time. It
// has one connection, which its sessions share in turn; you can create any number of clients. Memory grows with the largest body and is
// reused: a tick allocates nothing. No TLS: if the network is not private, run a TLS proxy on this machine.
//
// Tested on Linux. The code for Windows (Winsock; link Ws2_32) and macOS has not been run.

#ifndef LUDUS_HPP
#define LUDUS_HPP

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#ifdef _WIN32
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <winsock2.h>
#include <ws2tcpip.h>
#else
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>
#endif

namespace ludus {

enum class Error {
    None,
    Usage,        // invalid call: nothing was sent
    Refused,      // the server refused; status and word have the reason
    Lost,         // the server no longer has this session: start a new one
    Deadline,     // a tick was not answered in time
    Unreachable,  // no answer; the request may or may not have counted
};

// Result of a tick that misses its deadline.
enum class Fallback {
    Error,    // none: tick returns false
    Repeat,   // the last reply to a tick of this session; before the first reply default_body if has_default, else as Error
    Default,  // default_body
};

struct Options {
    std::string host;
    std::uint16_t port;
    std::string token;   // empty: none
    std::string prefix;  // prefix of all paths, behind a proxy: "/ludus"
    int timeout_ms;      // for each start, end and spec, including retries
    int deadline_ms;     // for a tick, including retries
    Fallback fallback;
    std::string default_body;
    bool has_default;  // needed for an empty default_body; a non-empty one is always used
    int retries;       // number of retries after a broken connection
    std::size_t max_reply_bytes;

    explicit Options(std::string host_ = "127.0.0.1", std::uint16_t port_ = 8000, std::string token_ = std::string())
        : host(std::move(host_)),
          port(port_),
          token(std::move(token_)),
          timeout_ms(10000),
          deadline_ms(10000),
          fallback(Fallback::Error),
          has_default(false),
          retries(2),
          max_reply_bytes(std::size_t(64) << 20) {}
};

struct Reply {
    std::string body;  // from the server, or the fallback of a missed tick
    bool missed;       // the body is the fallback or empty; error has the reason
    Error error;
    int status;           // HTTP status; 0 without an answer
    std::string word;     // error word for programs: "unknown_session"
    std::string message;  // for humans
    std::string hint;
    double retry_after_s;  // below 0: not given

    Reply() : missed(false), error(Error::None), status(0), retry_after_s(-1) {}
};

class Client;

// One match. Set the public members before start.
class Session {
public:
    std::string id;     // new for every match; empty: start generates one
    std::string match;  // common id of several sessions of one match
    std::string side;   // side of the match that this session plays: 0, 1, or a name of the training's self_play.sides
    std::string model;  // model to play; empty: the server decides
    std::int64_t version;  // version of the model; below 0: the current one
    double temperature;    // sampling temperature; below 0: the server decides

    explicit Session(std::string id_ = std::string())
        : id(std::move(id_)), version(-1), temperature(-1), next_(0), missed_(0), state_(Fresh), unsure_(false), has_action_(false) {}

    Session(Session&&) = default;
    Session& operator=(Session&&) = default;
    Session(const Session&) = delete;  // a copy would use the same number for two requests
    Session& operator=(const Session&) = delete;

    bool open() const { return state_ == Open; }
    // Number of ticks that were not answered in time.
    std::uint64_t missed() const { return missed_; }

private:
    friend class Client;
    enum State { Fresh, Starting, Open, Over };

    std::int64_t next_;  // number of the next request
    std::uint64_t missed_;
    State state_;
    // An attempt had no answer and may still arrive, after any number of other requests: then the server's 409 corrects next_.
    bool unsure_;
    bool has_action_;
    std::string action_;  // the last reply to a tick
    std::string made_id_;
};

// -- the raw format of the built-in actor ---------------------------------------------------------------------------------

// Body of start for a session with raw ticks.
inline const char* raw_start() { return "{\"format\": \"raw\"}"; }

// Body of a raw tick: begin, then the leaves of the observation in the order of GET /spec, then the mask, if any.
class RawWriter {
public:
    // The reward belongs to the previous action.
    RawWriter& begin(float reward = 0, bool terminated = false, bool truncated = false) {
        body_.clear();
        f32(reward);
        return u32((terminated ? 1u : 0u) | (truncated ? 2u : 0u));
    }
    RawWriter& f32(float value) {
        std::uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return u32(bits);
    }
    RawWriter& f64(double value) {
        std::uint64_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return put(bits, 8);
    }
    RawWriter& f32s(const float* values, std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) f32(values[i]);
        return *this;
    }
    RawWriter& u8(std::uint8_t value) { return put(value, 1); }
    RawWriter& u8s(const std::uint8_t* values, std::size_t count) {
        if (count) body_.append(reinterpret_cast<const char*>(values), count);
        return *this;
    }
    RawWriter& u32(std::uint32_t value) { return put(value, 4); }
    RawWriter& i32(std::int32_t value) { return put(static_cast<std::uint32_t>(value), 4); }
    RawWriter& i64(std::int64_t value) { return put(static_cast<std::uint64_t>(value), 8); }
    RawWriter& i64s(const std::int64_t* values, std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) i64(values[i]);
        return *this;
    }
    // Call it last: one entry per option, 0 = forbidden.
    RawWriter& mask(const std::uint8_t* allowed, std::size_t count) {
        if (body_.size() >= 8) body_[4] = static_cast<char>(body_[4] | 4);
        return u8s(allowed, count);
    }
    const std::string& body() const { return body_; }

private:
    RawWriter& put(std::uint64_t bits, int size) {
        for (int i = 0; i < size; ++i) body_.push_back(static_cast<char>(static_cast<unsigned char>(bits >> (8 * i))));
        return *this;
    }
    std::string body_;
};

// The leaves of an action, in the order of GET /spec: Discrete and MultiDiscrete are i64, a Box of reals f32, MultiBinary u8.
// Reads beyond the end return 0, and ok() is false. The body must outlive the reader.
class RawReader {
public:
    explicit RawReader(const std::string& body) : data_(body.data()), size_(body.size()), at_(0), ok_(true) {}

    bool empty() const { return size_ == 0; }  // no action: the episode is over
    std::size_t left() const { return size_ - at_; }
    bool ok() const { return ok_; }
    float f32() {
        std::uint32_t bits = static_cast<std::uint32_t>(take(4));
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    double f64() {
        std::uint64_t bits = take(8);
        double value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    std::uint8_t u8() { return static_cast<std::uint8_t>(take(1)); }
    std::uint32_t u32() { return static_cast<std::uint32_t>(take(4)); }
    std::int32_t i32() { return to_signed<std::int32_t>(u32()); }
    std::int64_t i64() { return to_signed<std::int64_t>(take(8)); }

private:
    template <typename To, typename From>
    static To to_signed(From bits) {
        To value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    std::uint64_t take(std::size_t size) {
        if (size > left()) {
            at_ = size_;
            ok_ = false;
            return 0;
        }
        std::uint64_t bits = 0;
        for (std::size_t i = 0; i < size; ++i) bits |= std::uint64_t(static_cast<unsigned char>(data_[at_ + i])) << (8 * i);
        at_ += size;
        return bits;
    }
    const char* data_;
    std::size_t size_, at_;
    bool ok_;
};

// -- implementation; games need only Client below ---------------------------------------------------------------------------

namespace detail {

const std::size_t max_head_bytes = std::size_t(64) << 10;
const std::size_t max_name_bytes = 256;
const int max_interim_replies = 8;
const int retry_pause_ms = 200;  // before the second retry; the first is immediate, because usually an idle connection was closed
const int busy_pause_ms = 2, max_busy_pause_ms = 20;

// Remaining time of a call.
class Clock {
public:
    explicit Clock(int limit_ms) : end_(std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms)) {}
    double left_ms() const {
        return std::chrono::duration<double, std::milli>(end_ - std::chrono::steady_clock::now()).count();
    }
    bool over() const { return left_ms() <= 0; }
    // For poll: rounded up, to avoid busy waiting in the last millisecond.
    int poll_ms() const {
        double left = left_ms();
        return left <= 0 ? 0 : left > 1e9 ? 1000000000 : static_cast<int>(left) + 1;
    }

private:
    std::chrono::steady_clock::time_point end_;
};

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }
inline char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

inline int hex_digit(char c) {
    if (is_digit(c)) return c - '0';
    c = lower(c);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

inline std::string decimal(std::int64_t value) { return std::to_string(static_cast<long long>(value)); }

// Non-owning range of bytes.
struct Span {
    const char* data;
    std::size_t size;

    bool is(const char* word) const {  // `word` in lower case
        std::size_t i = 0;
        for (; i < size && word[i]; ++i)
            if (lower(data[i]) != word[i]) return false;
        return i == size && !word[i];
    }
    Span trimmed() const {
        Span part = *this;
        while (part.size && (part.data[0] == ' ' || part.data[0] == '\t')) ++part.data, --part.size;
        while (part.size && (part.data[part.size - 1] == ' ' || part.data[part.size - 1] == '\t')) --part.size;
        return part;
    }
    // Only digits, and within the limit.
    bool number(std::uint64_t limit, std::uint64_t* value) const {
        *value = 0;
        for (std::size_t i = 0; i < size; ++i) {
            if (!is_digit(data[i])) return false;
            unsigned digit = static_cast<unsigned>(data[i] - '0');
            if (*value > (limit - digit) / 10) return false;
            *value = *value * 10 + digit;
        }
        return size > 0;
    }
};

// Whether a text is allowed in a header value; prevents header injection.
inline bool fits_header(const std::string& text, std::size_t limit) {
    if (text.empty() || text.size() > limit || text[0] == ' ' || text[text.size() - 1] == ' ') return false;
    for (std::size_t i = 0; i < text.size(); ++i) {
        unsigned char c = static_cast<unsigned char>(text[i]);
        if (c < 0x20 || c == 0x7f) return false;
    }
    return true;
}

// Head of a reply.
struct Head {
    int status;
    bool old;  // HTTP/1.0
    bool close;
    bool chunked;
    bool has_length;
    std::uint64_t length;
    double retry_after_s;
};

// Parse from the status line to the empty line, both included. Returns nullptr, or the error.
inline const char* parse_head(const char* data, std::size_t size, Head* head) {
    const char* const bad = "what came back is not HTTP/1.1";
    *head = Head{0, false, false, false, false, 0, -1};
    if (size < 14 || std::memcmp(data, "HTTP/1.", 7) != 0 || (data[7] != '0' && data[7] != '1') || data[8] != ' ') return bad;
    head->old = head->close = data[7] == '0';
    for (int i = 9; i < 12; ++i) {
        if (!is_digit(data[i])) return bad;
        head->status = head->status * 10 + (data[i] - '0');
    }
    if (head->status < 100 || (data[12] != ' ' && data[12] != '\r')) return bad;
    bool first = true;
    for (std::size_t at = 0; at < size;) {
        const char* stop = static_cast<const char*>(std::memchr(data + at, '\r', size - at));
        if (!stop || stop + 1 >= data + size || stop[1] != '\n') return bad;
        Span line = {data + at, static_cast<std::size_t>(stop - data) - at};
        at += line.size + 2;
        if (std::memchr(line.data, '\n', line.size) || std::memchr(line.data, '\0', line.size)) return bad;
        if (first || line.size == 0) {
            first = false;
            continue;
        }
        const char* colon = static_cast<const char*>(std::memchr(line.data, ':', line.size));
        if (!colon || colon == line.data) return bad;
        Span name = {line.data, static_cast<std::size_t>(colon - line.data)};
        if (std::memchr(name.data, ' ', name.size) || std::memchr(name.data, '\t', name.size)) return bad;
        Span value = Span{colon + 1, line.size - name.size - 1}.trimmed();
        if (name.is("content-length")) {
            std::uint64_t length;
            if (!value.number(std::uint64_t(1) << 62, &length)) return "its Content-Length is not a number";
            if (head->has_length && head->length != length) return "it has two lengths";
            head->has_length = true;
            head->length = length;
        } else if (name.is("transfer-encoding")) {
            if (head->chunked || !value.is("chunked")) return "its Transfer-Encoding is not chunked";
            head->chunked = true;
        } else if (name.is("connection")) {
            if (value.is("close")) head->close = true;
        } else if (name.is("retry-after")) {  // may also be a date; a Ludus server does not send one
            Span whole = value, part = {value.data, 0};
            const char* dot = static_cast<const char*>(std::memchr(value.data, '.', value.size));
            if (dot) {
                whole.size = static_cast<std::size_t>(dot - value.data);
                part = Span{dot + 1, value.size - whole.size - 1};
            }
            std::uint64_t seconds = 0, fraction = 0;
            double scale = 1;
            for (std::size_t i = 0; i < part.size; ++i) scale *= 10;
            if (whole.number(1000000000, &seconds) && (!dot || (part.size < 10 && part.number(1000000000, &fraction))))
                head->retry_after_s = static_cast<double>(seconds) + static_cast<double>(fraction) / scale;
        }
    }
    if (head->chunked && head->has_length) return "it has a length and chunks";
    return nullptr;
}

// Top-level strings and number of a refusal's JSON; nested values are skipped.
class Refusal {
public:
    std::string word, message, hint;
    std::int64_t last;

    Refusal() : last(-1), at_(nullptr), end_(nullptr) {}

    // False: not the JSON of a Ludus server.
    bool read(const char* data, std::size_t size) {
        at_ = data;
        end_ = data + size;
        bool has_word = false, has_message = false;
        std::string key, value;
        if (!take('{')) return false;
        if (take('}')) return false;
        for (;;) {
            skip();
            if (!text(&key) || !take(':')) return false;
            skip();
            if (at_ < end_ && *at_ == '"') {
                if (!text(&value)) return false;
                if (key == "error") word = value, has_word = true;
                if (key == "message") message = value, has_message = true;
                if (key == "hint") hint = value;
            } else {
                const char* begin = at_;
                if (!pass_over()) return false;
                std::uint64_t number;
                Span said = {begin, static_cast<std::size_t>(at_ - begin)};
                if (key == "last" && said.number((std::uint64_t(1) << 63) - 2, &number)) last = static_cast<std::int64_t>(number);
            }
            if (take(',')) continue;
            return take('}') && has_word && has_message;
        }
    }

private:
    void skip() {
        while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r' || *at_ == '\n')) ++at_;
    }
    bool take(char c) {
        skip();
        if (at_ >= end_ || *at_ != c) return false;
        ++at_;
        return true;
    }
    bool hex4(unsigned* code) {
        *code = 0;
        if (end_ - at_ < 4) return false;
        for (int i = 0; i < 4; ++i) {
            int digit = hex_digit(*at_++);
            if (digit < 0) return false;
            *code = *code * 16 + static_cast<unsigned>(digit);
        }
        return true;
    }
    static void put_utf8(unsigned code, std::string* out) {
        if (code < 0x80) {
            out->push_back(static_cast<char>(code));
            return;
        }
        int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
        static const unsigned marks[] = {0, 0xc0, 0xe0, 0xf0};
        out->push_back(static_cast<char>(static_cast<unsigned char>(marks[more] | (code >> (6 * more)))));
        while (more--) out->push_back(static_cast<char>(static_cast<unsigned char>(0x80 | ((code >> (6 * more)) & 0x3f))));
    }
    bool text(std::string* out) {
        out->clear();
        if (at_ >= end_ || *at_++ != '"') return false;
        while (at_ < end_) {
            char c = *at_++;
            if (c == '"') return true;
            if (c != '\\') {
                out->push_back(c);
                continue;
            }
            if (at_ >= end_) return false;
            c = *at_++;
            static const char from[] = "\"\\/bfnrt";
            static const char to[] = "\"\\/\b\f\n\r\t";
            const char* found = c ? std::strchr(from, c) : nullptr;
            if (found) {
                out->push_back(to[found - from]);
                continue;
            }
            unsigned code, low;
            if (c != 'u' || !hex4(&code)) return false;
            if (code >= 0xd800 && code < 0xdc00 && end_ - at_ >= 6 && at_[0] == '\\' && at_[1] == 'u') {
                const char* here = at_;
                at_ += 2;
                if (hex4(&low) && low >= 0xdc00 && low < 0xe000)
                    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                else
                    at_ = here;
            }
            put_utf8(code >= 0xd800 && code < 0xe000 ? 0xfffd : code, out);
        }
        return false;
    }
    // Skip a number, a word, or a nested value of any depth.
    bool pass_over() {
        int depth = 0;
        const char* begin = at_;
        while (at_ < end_) {
            char c = *at_;
            if (c == '"') {
                std::string ignored;
                if (!text(&ignored)) return false;
                continue;
            }
            if (depth == 0 && (c == ',' || c == '}' || c == ']' || c == ' ' || c == '\r' || c == '\n' || c == '\t')) break;
            if (c == '{' || c == '[') ++depth;
            if (c == '}' || c == ']') --depth;
            ++at_;
            if (depth == 0 && (c == '}' || c == ']')) break;
        }
        return depth == 0 && at_ > begin;
    }
    const char* at_;
    const char* end_;
};

// -- sockets --------------------------------------------------------------------------------------------------------------

#ifdef _WIN32
typedef SOCKET Handle;
const Handle no_handle = INVALID_SOCKET;
inline int last_error() { return WSAGetLastError(); }
inline bool would_block(int error) { return error == WSAEWOULDBLOCK || error == WSAEINPROGRESS; }
inline bool interrupted(int) { return false; }
inline bool was_refused(int error) { return error == WSAECONNREFUSED; }
inline void close_handle(Handle handle) { closesocket(handle); }
inline void pause(int ms) { Sleep(static_cast<DWORD>(ms)); }
inline std::string error_text(int error) { return "error " + decimal(error); }
inline bool unblock(Handle handle) {
    u_long yes = 1;
    return ioctlsocket(handle, FIONBIO, &yes) == 0;
}
// 1 readable, 2 writable or failed; 0 on time-out. Uses select, because WSAPoll does not report failed connects on all versions.
inline int wait_for(Handle handle, bool read, bool write, int ms) {
    fd_set in, out, failed;
    FD_ZERO(&in);
    FD_ZERO(&out);
    FD_ZERO(&failed);
    if (read) FD_SET(handle, &in);
    if (write) FD_SET(handle, &out);
    FD_SET(handle, &failed);
    timeval limit = {ms / 1000, (ms % 1000) * 1000};
    if (select(0, &in, &out, &failed, &limit) <= 0) return 0;
    return (FD_ISSET(handle, &in) ? 1 : 0) | (FD_ISSET(handle, &out) || FD_ISSET(handle, &failed) ? 2 : 0);
}
// Winsock start-up is reference-counted.
struct Winsock {
    Winsock() {
        WSADATA data;
        ready = WSAStartup(MAKEWORD(2, 2), &data) == 0;
    }
    ~Winsock() {
        if (ready) WSACleanup();
    }
    bool ready;
};
#else
typedef int Handle;
const Handle no_handle = -1;
inline int last_error() { return errno; }
inline bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINPROGRESS; }
inline bool interrupted(int error) { return error == EINTR; }
inline bool was_refused(int error) { return error == ECONNREFUSED; }
inline void close_handle(Handle handle) { ::close(handle); }
inline void pause(int ms) { ::poll(nullptr, 0, ms); }
inline std::string error_text(int error) { return std::strerror(error); }
inline bool unblock(Handle handle) {
    int flags = ::fcntl(handle, F_GETFL, 0);
    return flags >= 0 && ::fcntl(handle, F_SETFL, flags | O_NONBLOCK) == 0 && ::fcntl(handle, F_SETFD, FD_CLOEXEC) == 0;
}
// 1 readable, 2 writable or failed; 0 on time-out.
inline int wait_for(Handle handle, bool read, bool write, int ms) {
    struct pollfd asked = {handle, static_cast<short>((read ? POLLIN : 0) | (write ? POLLOUT : 0)), 0};
    if (::poll(&asked, 1, ms) <= 0) return 0;
    bool failed = (asked.revents & (POLLERR | POLLHUP | POLLNVAL)) != 0;
    return ((asked.revents & POLLIN) || (failed && read) ? 1 : 0) | ((asked.revents & POLLOUT) || (failed && write) ? 2 : 0);
}
#endif

// One reply of the server.
struct Answer {
    int status;
    bool close;
    double retry_after_s;
    bool ours;  // the refusal has the JSON of a Ludus server, so it is not from a proxy
    Refusal refusal;
};

// One connection. On any error it is closed, and `why` has the reason.
class Connection {
public:
    std::string why;
    bool refused;  // connection refused

    Connection() : refused(false), handle_(no_handle), at_(0), used_(0), best_(0) {}
    ~Connection() { close(); }
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    void close() {
        if (handle_ != no_handle) close_handle(handle_);
        handle_ = no_handle;
        at_ = used_ = 0;
    }

    // A name is resolved once, and again at a start after a failure, because name resolution cannot be interrupted.
    void forget_addresses() { addresses_.clear(); }

    // Send the request and read the reply; its body goes into `body`.
    bool ask(const std::string& host, std::uint16_t port, const std::string& request, std::size_t max_body, const Clock& clock,
             Answer* answer, std::string* body) {
        refused = false;
        // The server may have closed an idle connection; unsolicited bytes answer no request.
        if (handle_ != no_handle && wait_for(handle_, true, false, 0)) close();
        if (handle_ == no_handle && !connect(host, port, clock)) return false;
        bool whole;
        if (!send(request, clock, &whole) || !receive(max_body, clock, answer, body)) {
            close();
            return false;
        }
        if (answer->close || !whole) close();  // else the next request would be read as the rest of this one
        return true;
    }

private:
    struct Address {
        sockaddr_storage storage;
        socklen_t size;
        int family;
    };

    bool fail(const char* what) {
        why = what;
        return false;
    }
    bool fail_with(int error) {
        refused = was_refused(error);
        why = error_text(error);
        return false;
    }

    bool resolve(const std::string& host, std::uint16_t port) {
        if (!addresses_.empty()) return true;
        addrinfo hints;
        std::memset(&hints, 0, sizeof hints);
        hints.ai_family = AF_UNSPEC;
        hints.ai_socktype = SOCK_STREAM;
        addrinfo* found = nullptr;
        if (::getaddrinfo(host.c_str(), decimal(port).c_str(), &hints, &found) != 0 || !found) return fail("the host is not known");
        for (addrinfo* one = found; one; one = one->ai_next) {
            Address address;
            if (static_cast<std::size_t>(one->ai_addrlen) > sizeof address.storage) continue;
            std::memset(&address.storage, 0, sizeof address.storage);
            std::memcpy(&address.storage, one->ai_addr, static_cast<std::size_t>(one->ai_addrlen));
            address.size = static_cast<socklen_t>(one->ai_addrlen);
            address.family = one->ai_family;
            addresses_.push_back(address);
        }
        ::freeaddrinfo(found);
        best_ = 0;
        return !addresses_.empty() || fail("the host has no address");
    }

    bool connect(const std::string& host, std::uint16_t port, const Clock& clock) {
        if (!resolve(host, port)) return false;
        std::size_t count = addresses_.size();
        for (std::size_t i = 0; i < count; ++i) {
            std::size_t which = (best_ + i) % count;
            // Divide the time among the remaining addresses: the first may never answer.
            int share_ms = static_cast<int>(clock.left_ms() / static_cast<double>(count - i)) + 1;
            if (clock.over()) return fail("timed out");
            if (connect_to(addresses_[which], share_ms)) {
                best_ = which;
                return true;
            }
            close();
        }
        return false;
    }

    bool connect_to(const Address& address, int limit_ms) {
        handle_ = ::socket(address.family, SOCK_STREAM, 0);
        if (handle_ == no_handle) return fail_with(last_error());
        if (!unblock(handle_)) return fail_with(last_error());
        int yes = 1;
        ::setsockopt(handle_, IPPROTO_TCP, TCP_NODELAY, reinterpret_cast<const char*>(&yes), sizeof yes);
#ifdef SO_NOSIGPIPE
        ::setsockopt(handle_, SOL_SOCKET, SO_NOSIGPIPE, reinterpret_cast<const char*>(&yes), sizeof yes);
#endif
        if (::connect(handle_, reinterpret_cast<const sockaddr*>(&address.storage), address.size) == 0) return true;
        if (!would_block(last_error()) && !interrupted(last_error())) return fail_with(last_error());
        Clock clock(limit_ms);
        while (!wait_for(handle_, false, true, clock.poll_ms()))
            if (clock.over()) return fail("timed out");
        int error = 0;
        socklen_t size = sizeof error;
        if (::getsockopt(handle_, SOL_SOCKET, SO_ERROR, reinterpret_cast<char*>(&error), &size) != 0) return fail_with(last_error());
        return error == 0 || fail_with(error);
    }

    // Also true if the answer arrives before everything was sent: a refusal.
    bool send(const std::string& request, const Clock& clock, bool* whole) {
        *whole = false;
#ifdef MSG_NOSIGNAL
        const int flags = MSG_NOSIGNAL;
#else
        const int flags = 0;
#endif
        const std::size_t most = std::size_t(1) << 20;  // per call: some systems use int
        for (std::size_t sent = 0; sent < request.size();) {
            std::size_t size = request.size() - sent < most ? request.size() - sent : most;
#ifdef _WIN32
            int done = ::send(handle_, request.data() + sent, static_cast<int>(size), flags);
#else
            ssize_t done = ::send(handle_, request.data() + sent, size, flags);
#endif
            if (done >= 0) {
                sent += static_cast<std::size_t>(done);
                if (clock.over() && sent < request.size()) return fail("timed out");
                continue;
            }
            int error = last_error();
            if (interrupted(error)) continue;
            if (!would_block(error)) return fail_with(error);
            int ready = wait_for(handle_, true, true, clock.poll_ms());
            if (ready == 1) return true;
            if (!ready && clock.over()) return fail("timed out");
        }
        *whole = true;
        return true;
    }

    // Read more bytes to the end of `in_`.
    bool more(const Clock& clock) {
        const std::size_t step = std::size_t(16) << 10;
        if (at_ && at_ == used_) at_ = used_ = 0;
        if (in_.size() - used_ < step) in_.resize(in_.size() < 2 * step ? 4 * step : in_.size() * 2);
        for (;;) {
            if (clock.over()) return fail("timed out");
#ifdef _WIN32
            int got = ::recv(handle_, in_.data() + used_, static_cast<int>(step), 0);
#else
            ssize_t got = ::recv(handle_, in_.data() + used_, in_.size() - used_, 0);
#endif
            if (got > 0) {
                used_ += static_cast<std::size_t>(got);
                return true;
            }
            if (got == 0) return fail("it was closed by the server");
            int error = last_error();
            if (interrupted(error)) continue;
            if (!would_block(error)) return fail_with(error);
            wait_for(handle_, true, false, clock.poll_ms());
        }
    }

    bool receive(std::size_t max_body, const Clock& clock, Answer* answer, std::string* body) {
        Head head;
        at_ = used_ = 0;
        for (int interim = 0;; ++interim) {
            if (interim > max_interim_replies) return fail("it never comes to an answer");
            std::size_t end;
            if (!head_end(clock, &end)) return false;
            const char* wrong = parse_head(in_.data() + at_, end - at_, &head);
            if (wrong) return fail(wrong);
            at_ = end;
            if (head.status >= 200) break;
            if (head.status == 101) return fail("it speaks another protocol now");
        }
        body->clear();
        bool bodiless = head.status == 204 || head.status == 304;
        if (head.chunked) {
            if (!chunks(max_body, clock, body)) return false;
        } else if (head.has_length && !bodiless) {
            if (head.length > max_body) return fail("the reply is too large");
            if (!take(static_cast<std::size_t>(head.length), clock, body)) return false;
        } else if (!bodiless) {
            return fail("a reply came without a length");
        }
        if (at_ != used_) return fail("more came back than was asked for");
        answer->status = head.status;
        answer->close = head.close;
        answer->retry_after_s = head.retry_after_s;
        answer->refusal = Refusal();
        answer->ours = head.status != 200 && body->size() <= max_head_bytes && answer->refusal.read(body->data(), body->size());
        return true;
    }

    // Find the end of the next head.
    bool head_end(const Clock& clock, std::size_t* end) {
        for (std::size_t seen = at_;;) {
            for (; seen + 4 <= used_; ++seen) {
                if (std::memcmp(in_.data() + seen, "\r\n\r\n", 4) == 0) {
                    *end = seen + 4;
                    return true;
                }
            }
            std::size_t size = used_ - at_, known = size < 7 ? size : 7;
            if (size > max_head_bytes || (known && std::memcmp(in_.data() + at_, "HTTP/1.", known) != 0))
                return fail("what came back is not HTTP/1.1");
            if (at_ == used_) seen = 0;  // `more` starts at the front again
            if (!more(clock)) return false;
        }
    }

    bool take(std::size_t size, const Clock& clock, std::string* body) {
        while (size) {
            if (at_ == used_ && !more(clock)) return false;
            std::size_t part = used_ - at_ < size ? used_ - at_ : size;
            body->append(in_.data() + at_, part);
            at_ += part;
            size -= part;
        }
        return true;
    }

    // Read a line of less than `limit` bytes, without its CR LF.
    bool line(const Clock& clock, std::size_t limit, std::string* text) {
        text->clear();
        for (;;) {
            if (at_ == used_ && !more(clock)) return false;
            char c = in_[at_++];
            if (c == '\n') {
                if (text->empty() || text->back() != '\r') return fail("a line of its chunks does not end");
                text->pop_back();
                return true;
            }
            if (text->size() >= limit) return fail("a line of its chunks is too long");
            text->push_back(c);
        }
    }

    bool chunks(std::size_t max_body, const Clock& clock, std::string* body) {
        for (;;) {
            if (!line(clock, 1024, &line_)) return false;
            std::uint64_t size = 0;
            std::size_t digits = 0;
            for (; digits < line_.size() && hex_digit(line_[digits]) >= 0; ++digits) {
                if (size > (std::uint64_t(1) << 56)) return fail("a chunk is too large");
                size = size * 16 + static_cast<std::uint64_t>(hex_digit(line_[digits]));
            }
            std::size_t after = digits;
            while (after < line_.size() && (line_[after] == ' ' || line_[after] == '\t')) ++after;
            if (!digits || (after < line_.size() && line_[after] != ';')) return fail("a chunk has no size");
            if (size == 0) break;
            if (size > max_body - body->size()) return fail("the reply is too large");
            if (!take(static_cast<std::size_t>(size), clock, body)) return false;
            if (!line(clock, 2, &line_)) return false;
            if (!line_.empty()) return fail("a chunk does not end where it should");
        }
        for (std::size_t total = 0; total < max_head_bytes; total += line_.size() + 2) {
            if (!line(clock, max_head_bytes, &line_)) return false;
            if (line_.empty()) return true;
        }
        return fail("its trailers do not end");
    }

#ifdef _WIN32
    Winsock winsock_;
#endif
    Handle handle_;
    std::vector<char> in_;  // in_[at_ .. used_) is unread
    std::size_t at_, used_;
    std::string line_;
    std::vector<Address> addresses_;
    std::size_t best_;  // the address that worked last
};

}  // namespace detail

// -- the client -------------------------------------------------------------------------------------------------------------

class Client {
public:
    explicit Client(Options options = Options()) : options_(std::move(options)), random_(seed()), missed_(0), failed_(false) {
        check();
    }
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;

    // Begin a session; blocks for at most timeout_ms. Without an answer the same call may be repeated with the same body.
    bool start(Session& session, const std::string& body, Reply& reply) { return start(session, body.data(), body.size(), reply); }
    bool start(Session& session, const void* body, std::size_t size, Reply& reply) {
        if (!prepare(reply)) return false;
        if (session.state_ == Session::Open)
            return usage(reply, "The session " + session.id + " is open.", "End it, or take another one.");
        if (failed_) connection_.forget_addresses();
        if (session.state_ != Session::Starting) {
            if (session.id.empty() || session.id == session.made_id_) session.id = session.made_id_ = fresh_id();
            // A number that was not used before: this start is never mistaken for the retry of another.
            session.next_ = static_cast<std::int64_t>(draw() >> 33);
            session.missed_ = 0;
            session.unsure_ = session.has_action_ = false;
        }
        if (!headers(session, reply)) return false;
        bool answered = ask("start", session, body, size, detail::Clock(options_.timeout_ms), reply);
        session.state_ = answered ? Session::Open : reply.error == Error::Unreachable ? Session::Starting : Session::Fresh;
        return answered;
    }

    // Request the next action; blocks for at most the deadline (0: deadline_ms of the options). True: reply.body is an action;
    // if reply.missed is also true, it is the fallback, and reply.error has the reason.
    bool tick(Session& session, const std::string& body, Reply& reply, int deadline_ms = 0) {
        return tick(session, body.data(), body.size(), reply, deadline_ms);
    }
    bool tick(Session& session, const void* body, std::size_t size, Reply& reply, int deadline_ms = 0) {
        if (!prepare(reply) || !started(session, reply)) return false;
        if (deadline_ms < 0) return usage(reply, "deadline_ms is below 0.", "It is a number of milliseconds.");
        detail::Clock clock(deadline_ms ? deadline_ms : options_.deadline_ms);
        headers_.clear();
        if (ask("tick", session, body, size, clock, reply)) {
            session.action_ = reply.body;
            session.has_action_ = true;
            return true;
        }
        if (reply.error == Error::Unreachable && clock.over()) {
            reply.error = Error::Deadline;
            reply.word = "deadline";
            reply.hint = "The session goes on with the next tick.";
        }
        bool late = reply.error == Error::Deadline || reply.error == Error::Unreachable;
        if (!late && !not_now(reply.status, reply.word != "http")) return false;
        reply.missed = true;
        ++session.missed_;
        ++missed_;
        return fall_back(session, reply);
    }

    // End a session; blocks for at most timeout_ms. Without an answer the same call may be repeated.
    bool end(Session& session, const std::string& body, Reply& reply) { return end(session, body.data(), body.size(), reply); }
    bool end(Session& session, const void* body, std::size_t size, Reply& reply) {
        if (!prepare(reply) || !started(session, reply)) return false;
        headers_.clear();
        bool ended = ask("end", session, body, size, detail::Clock(options_.timeout_ms), reply);
        if (ended) session.state_ = Session::Over;
        return ended;
    }

    // Get the JSON of GET /spec.
    bool spec(Reply& reply) {
        if (!prepare(reply)) return false;
        request_.assign("GET ").append(options_.prefix).append("/spec HTTP/1.1\r\n").append(common_).append("\r\n");
        detail::Clock clock(options_.timeout_ms);
        for (int failures = 0;; ++failures) {
            detail::Answer answer;
            if (once(clock, &answer, reply)) return answer.status == 200 || refuse(answer, reply);
            if (clock.over() || failures >= options_.retries) return unreachable(reply, clock, options_.timeout_ms);
            sleep(clock, detail::retry_pause_ms * failures);
        }
    }

    // Number of ticks that were not answered in time, in all sessions.
    std::uint64_t missed() const { return missed_; }
    const Options& options() const { return options_; }
    // Close the connection. Sessions stay open on the server; the next call reconnects.
    void close() { connection_.close(); }

private:
    static std::uint64_t seed() {
        // On some platforms random_device alone is the same in every process.
        std::random_device device;
        std::uint64_t now = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
        return (std::uint64_t(device()) << 32 | device()) ^ now;
    }
    std::uint64_t draw() { return random_() ^ static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(this)) << 16; }

    std::string fresh_id() {
        static const char digits[] = "0123456789abcdef";
        std::string id;
        for (int i = 0; i < 2; ++i) {
            std::uint64_t bits = draw();
            for (int k = 0; k < 16; ++k) id.push_back(digits[(bits >> (4 * k)) & 15]);
        }
        return id;
    }

    void check() {
        const Options& o = options_;
        if (!detail::fits_header(o.host, 255) || o.port == 0) wrong_ = "The host or the port is none.";
        if (!o.token.empty() && !detail::fits_header(o.token, 16 * detail::max_name_bytes)) wrong_ = "The token cannot be sent in a header.";
        if (!o.prefix.empty() && (!detail::fits_header(o.prefix, 1024) || o.prefix[0] != '/' || o.prefix.find(' ') != std::string::npos))
            wrong_ = "The prefix is not a path.";
        if (o.timeout_ms <= 0 || o.deadline_ms <= 0 || o.retries < 0 || o.max_reply_bytes == 0) wrong_ = "An option is out of range.";
        if (o.fallback == Fallback::Default && o.default_body.empty() && !o.has_default) wrong_ = "Fallback::Default without a default_body.";
        bool v6 = o.host.find(':') != std::string::npos;
        common_ = "Host: " + (v6 ? "[" + o.host + "]" : o.host) + ":" + detail::decimal(o.port) + "\r\n";
        if (!o.token.empty()) common_ += "Authorization: Bearer " + o.token + "\r\n";
    }

    bool prepare(Reply& reply) const {
        reply.body.clear();
        reply.missed = false;
        reply.error = Error::None;
        reply.status = 0;
        reply.word.clear();
        reply.message.clear();
        reply.hint.clear();
        reply.retry_after_s = -1;
        return wrong_.empty() || usage(reply, wrong_, "Correct the options.");
    }

    static bool usage(Reply& reply, const std::string& message, const char* hint) {
        reply.error = Error::Usage;
        reply.word = "usage";
        reply.message = message;
        reply.hint = hint;
        return false;
    }

    static bool started(const Session& session, Reply& reply) {
        if (session.state_ == Session::Open) return true;
        return usage(reply, "This session is not open.", "Start it first.");
    }

    // Headers of a start only.
    bool headers(const Session& session, Reply& reply) {
        headers_.clear();
        if (!name(session.id, nullptr)) return usage(reply, "The session id cannot be sent in a header.", "A UUID will do.");
        if (!name(session.match, "Ludus-Match: ")) return usage(reply, "The match cannot be sent in a header.", "A UUID will do.");
        if (!name(session.side, "Ludus-Side: ")) return usage(reply, "The side cannot be sent in a header.", "It is a name.");
        if (!name(session.model, "Ludus-Model: ")) return usage(reply, "The model cannot be sent in a header.", "It is a name.");
        if (session.version >= 0) headers_ += "Ludus-Version: " + detail::decimal(session.version) + "\r\n";
        if (session.temperature >= 0) {
            if (!(session.temperature <= 1e6)) return usage(reply, "The temperature is out of range.", "It is a small number.");
            // Not printf, whose decimal point depends on the locale.
            std::int64_t millionths = static_cast<std::int64_t>(session.temperature * 1e6 + 0.5);
            std::string part = detail::decimal(1000000 + millionths % 1000000).substr(1);
            while (part.size() > 1 && part[part.size() - 1] == '0') part.erase(part.size() - 1);
            headers_ += "Ludus-Temperature: " + detail::decimal(millionths / 1000000) + "." + part + "\r\n";
        }
        return true;
    }

    bool name(const std::string& value, const char* header) {
        if (header && value.empty()) return true;
        if (!detail::fits_header(value, detail::max_name_bytes)) return false;
        if (header) headers_ += header + value + "\r\n";
        return true;
    }

    // Send one request, with retries. Returns true if it was served.
    //
    // The number of a tick that may have counted is not used again. The next tick has the next number, and the server answers 409 if it
    // expects another one: so a reply is never mistaken for that of another request.
    bool ask(const char* kind, Session& session, const void* body, std::size_t size, const detail::Clock& clock, Reply& reply) {
        const bool starting = kind[0] == 's', ticking = kind[0] == 't';
        const int limit_ms = static_cast<int>(clock.left_ms() + 0.5);
        detail::Answer answer;
        for (int failures = 0, rounds = 0;;) {
            const std::int64_t number = session.next_;
            compose(kind, session, body, size);
            if (!once(clock, &answer, reply)) {
                if (!starting) session.unsure_ = true;
                if (!clock.over() && ++failures <= options_.retries && sleep(clock, detail::retry_pause_ms * (failures - 1)))
                    continue;  // same number: it counts once
                if (ticking) give_up(session, number);
                return unreachable(reply, clock, limit_ms);
            }
            if (answer.status == 200) {
                session.next_ = number + 1;
                return true;
            }
            if (answer.status == 409 && session.unsure_ && !starting && answer.ours) {
                bool busy = answer.refusal.word == "busy";
                if (!busy && (answer.refusal.word != "seq" || answer.refusal.last < 0)) return refuse(answer, reply);
                if (!busy) session.next_ = answer.refusal.last + 1;
                ++rounds;
                int pause_ms = detail::busy_pause_ms * rounds;
                if (pause_ms > detail::max_busy_pause_ms) pause_ms = detail::max_busy_pause_ms;
                if (!sleep(clock, busy || rounds > 2 ? pause_ms : 0)) {
                    detail::pause(clock.poll_ms());
                    connection_.why = busy ? "the request before is still being answered" : "the numbers do not agree";
                    return unreachable(reply, clock, limit_ms);
                }
                continue;
            }
            if (not_now(answer.status, answer.ours)) {
                const bool foreign = answer.status >= 500 && !answer.ours;  // from a proxy: the server may have received the request
                if (foreign && !starting) session.unsure_ = true;
                ++failures;
                double pause_ms = answer.retry_after_s < 0 ? detail::retry_pause_ms * failures : answer.retry_after_s * 1000;
                if (failures <= options_.retries && pause_ms < clock.left_ms() && sleep(clock, static_cast<int>(pause_ms) + 1)) continue;
                if (foreign && ticking) give_up(session, number);
                if (foreign && answer.status != 503) return in_its_stead(answer, reply);
            }
            refuse(answer, reply);
            if (reply.error == Error::Lost) session.next_ = number + 1;  // else the server would repeat its reply to this one
            return false;
        }
    }

    static void give_up(Session& session, std::int64_t number) {
        session.next_ = number + 1;
        session.unsure_ = true;
    }

    void compose(const char* kind, const Session& session, const void* body, std::size_t size) {
        request_.assign("POST ").append(options_.prefix).append("/step HTTP/1.1\r\n").append(common_);
        request_.append("Ludus-Session: ").append(session.id).append("\r\nLudus-Step: ").append(kind);
        request_.append("\r\nLudus-Seq: ").append(detail::decimal(session.next_)).append("\r\n").append(headers_);
        request_.append("Content-Length: ").append(std::to_string(size)).append("\r\n\r\n");
        if (size) request_.append(static_cast<const char*>(body), size);
    }

    bool once(const detail::Clock& clock, detail::Answer* answer, Reply& reply) {
        failed_ = !connection_.ask(options_.host, options_.port, request_, options_.max_reply_bytes, clock, answer, &reply.body);
        return !failed_;
    }

    // False if the time would be over.
    static bool sleep(const detail::Clock& clock, int ms) {
        if (ms >= clock.left_ms()) return false;
        if (ms > 0) detail::pause(ms);
        return true;
    }

    // A retry may help: the server is full, or a proxy cannot reach it.
    static bool not_now(int status, bool ours) { return status == 429 || status == 503 || (status >= 500 && !ours); }

    static bool refuse(const detail::Answer& answer, Reply& reply) {
        const detail::Refusal& said = answer.refusal;
        const int status = answer.status;
        bool lost = answer.ours && (status == 410 || status == 500 || status == 504 || (status == 404 && said.word == "unknown_session"));
        reply.body.clear();
        reply.error = lost ? Error::Lost : Error::Refused;
        reply.status = status;
        reply.word = answer.ours ? said.word : "http";
        reply.message = answer.ours ? said.message : "The server answered " + detail::decimal(status) + ".";
        reply.hint = answer.ours ? said.hint : "";
        reply.retry_after_s = answer.retry_after_s;
        return false;
    }

    // A proxy got no answer from the server.
    bool in_its_stead(const detail::Answer& answer, Reply& reply) const {
        reply.body.clear();
        reply.error = Error::Unreachable;
        reply.status = answer.status;
        reply.word = "unreachable";
        reply.message = options_.host + ":" + detail::decimal(options_.port) + " answered " + detail::decimal(answer.status) +
                        ", which is no answer of a Ludus server.";
        reply.hint = "Is it running?";
        return false;
    }

    bool unreachable(Reply& reply, const detail::Clock& clock, int limit_ms) const {
        std::string where = options_.host + ":" + detail::decimal(options_.port);
        reply.body.clear();
        reply.error = Error::Unreachable;
        reply.word = "unreachable";
        if (connection_.refused) {
            reply.message = "Nothing listens on " + where + ".";
            reply.hint = "Start the server, or correct host and port.";
        } else if (clock.over()) {
            reply.message = where + " did not answer within " + detail::decimal(limit_ms) + " ms: " + connection_.why + ".";
            reply.hint = "Is the server overloaded, or its actor stuck?";
        } else {
            reply.message = "The connection to " + where + " broke: " + connection_.why + ".";
            reply.hint = "Is it a Ludus server, and is it still running?";
        }
        return false;
    }

    bool fall_back(const Session& session, Reply& reply) const {
        if (options_.fallback == Fallback::Error) return false;
        if (options_.fallback == Fallback::Repeat && session.has_action_) {
            reply.body = session.action_;
            return true;
        }
        if (options_.default_body.empty() && !options_.has_default) return false;
        reply.body = options_.default_body;
        return true;
    }

    const Options options_;
    std::string wrong_, common_, headers_, request_;
    std::mt19937_64 random_;
    detail::Connection connection_;
    std::uint64_t missed_;
    bool failed_;  // the last attempt failed
};

}  // namespace ludus

#endif  // LUDUS_HPP
