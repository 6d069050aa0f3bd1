// Does what its standard input says, one command per line, and tells what came of it: see tests/clients/driving.py.
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <new>
#include <sstream>

#include "ludus.hpp"

static long allocations = 0;

__attribute__((noinline)) void* operator new(std::size_t size) {
    ++allocations;
    void* made = std::malloc(size ? size : 1);
    if (!made) std::abort();
    return made;
}
__attribute__((noinline)) void operator delete(void* made) noexcept { std::free(made); }
#if __cplusplus >= 201402L
__attribute__((noinline)) void operator delete(void* made, std::size_t) noexcept { std::free(made); }
#endif

typedef std::map<std::string, std::string> Words;

static std::string hex(const std::string& data) {
    static const char digits[] = "0123456789abcdef";
    std::string text = "x";
    for (char c : data) text.append(1, digits[(c >> 4) & 15]).append(1, digits[c & 15]);
    return text;
}

// A word of the server may be anything.
static std::string plain(std::string word) {
    for (char& c : word)
        if (c <= ' ' || c > '~') c = '?';
    return word.empty() ? "-" : word;
}

static std::string unhex(const std::string& text) {
    std::string data;
    for (std::size_t i = 0; i + 1 < text.size(); i += 2)
        data.push_back(static_cast<char>(std::strtol(text.substr(i, 2).c_str(), nullptr, 16)));
    return data;
}

static std::string body_of(Words& words) {
    return words.count("zeros") ? std::string(std::strtoul(words["zeros"].c_str(), nullptr, 10), '\0') : unhex(words["body"]);
}

static int number(Words& words, const char* key, int otherwise) {
    return words.count(key) ? std::atoi(words[key].c_str()) : otherwise;
}

static const char* name_of(ludus::Error error) {
    switch (error) {
        case ludus::Error::None: return "ok";
        case ludus::Error::Usage: return "usage";
        case ludus::Error::Refused: return "refused";
        case ludus::Error::Lost: return "lost";
        case ludus::Error::Deadline: return "deadline";
        case ludus::Error::Unreachable: return "unreachable";
    }
    return "?";
}

struct Driver {
    std::unique_ptr<ludus::Client> client;
    ludus::Session session;
    ludus::Reply reply;
    long allocated = 0;  // by the last tick

    bool open(Words& words) {
        std::string url = words["url"].substr(7);  // http://
        std::size_t colon = url.rfind(':');
        ludus::Options options(url.substr(0, colon), static_cast<std::uint16_t>(std::atoi(url.substr(colon + 1).c_str())), words["token"]);
        options.timeout_ms = number(words, "timeout_ms", 10000);
        options.deadline_ms = number(words, "deadline_ms", 10000);
        options.retries = number(words, "retries", 2);
        options.fallback = words["fallback"] == "repeat"    ? ludus::Fallback::Repeat
                           : words["fallback"] == "default" ? ludus::Fallback::Default
                                                            : ludus::Fallback::Error;
        options.has_default = words.count("default") != 0;
        options.default_body = unhex(words["default"]);
        if (words.count("max_reply_bytes")) options.max_reply_bytes = static_cast<std::size_t>(number(words, "max_reply_bytes", 0));
        client.reset(new ludus::Client(options));
        ludus::Session none("x");
        bool wrong = !client->tick(none, "", reply) && reply.message != "This session is not open.";
        if (!wrong) reply = ludus::Reply();
        return !wrong;
    }

    bool start(Words& words) {
        if (words.count("again")) return client->start(session, body_of(words), reply);
        session = ludus::Session(words["session"]);
        session.match = words["match"];
        session.side = words["side"];
        session.model = words["model"];
        session.version = number(words, "version", -1);
        if (words.count("temperature")) session.temperature = std::atof(words["temperature"].c_str());
        return client->start(session, body_of(words), reply);
    }

    bool tick(const std::string& body, int deadline_ms) {
        long before = allocations;
        bool good = client->tick(session, body, reply, deadline_ms);
        allocated = allocations - before;
        return good;
    }

    // Written, sent to an actor that echoes it, and read again.
    bool raw() {
        const float floats[] = {0.25f, -3.0f};
        const std::int64_t whole[] = {-2};
        const std::uint8_t bytes[] = {1, 2}, mask[] = {1, 0, 1};
        ludus::RawWriter sent;
        sent.begin(-1.5f, false, true).f32s(floats, 2).i64s(whole, 1).u8(200).i32(7).f64(0.1).u8s(bytes, 2).mask(mask, 3);
        if (!client->tick(session, sent.body(), reply)) return false;
        ludus::RawReader got(reply.body);
        bool right = !got.empty() && got.f32() == -1.5f && got.u32() == 6 && got.f32() == 0.25f && got.f32() == -3.0f && got.i64() == -2 &&
                     got.u8() == 200 && got.i32() == 7 && got.f64() == 0.1 && got.left() == 5 && got.ok();
        right = right && got.i64() == 0 && !got.ok() && got.left() == 0 && got.u8() == 0;
        reply.body = right ? sent.body() : "wrong";
        return true;
    }

    bool run(const std::string& command, Words& words) {
        if (command == "open") return open(words);
        if (command == "start") return start(words);
        if (command == "tick") return tick(body_of(words), number(words, "deadline_ms", 0));
        if (command == "end") return client->end(session, body_of(words), reply);
        if (command == "spec") return client->spec(reply);
        return command == "raw" && raw();
    }
};

int main() {
    Driver driver;
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream stream(line);
        std::string command, word;
        Words words;
        std::getline(stream, command, ' ');
        while (std::getline(stream, word, ' ')) words[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
        auto began = std::chrono::steady_clock::now();
        bool good = driver.run(command, words);
        auto took = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - began);
        const ludus::Reply& reply = driver.reply;
        std::cout << "= " << (good ? "ok" : name_of(reply.error)) << ' ' << hex(good ? reply.body : reply.message)
                  << " status=" << reply.status << " word=" << plain(reply.word) << " hint=" << hex(reply.hint)
                  << " missed=" << driver.session.missed() << " flag=" << (reply.missed ? 1 : 0) << " allocated=" << driver.allocated
                  << " ms=" << took.count() << std::endl;
    }
}
