// CartPole in a loop of frames, as a game engine has one: no frame waits for the server. In C++ on Linux and macOS.
//
//     ludus serve examples/cartpole_http/cartpole.yaml
//     make frame_loop && ./frame_loop --url http://127.0.0.1:8000 --matches 10
//
//     --period N    frames from one decision to the next; the last action stays in force
//     --wait        for training: every frame waits for its action, and frames are as fast as they can be
//     --fps N       frames per second without --wait
//     --frames      prints the number of each frame, and pauses only for a millisecond

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "../ludus_agent.hpp"
#include "cart_pole.hpp"

namespace {

struct Arguments {
    ludus::Options options;
    unsigned matches = 1, period = 1, fps = 50;
    bool wait = false, frames = false;
};

bool parse(int count, char** words, Arguments& into) {
    for (int i = 1; i < count; ++i) {
        const bool last = i + 1 == count;
        if (!std::strcmp(words[i], "--wait")) {
            into.wait = true;
        } else if (!std::strcmp(words[i], "--frames")) {
            into.frames = true;
        } else if (last) {
            return false;
        } else if (!std::strcmp(words[i], "--url")) {
            char host[256];
            unsigned port;
            if (std::sscanf(words[++i], "http://%255[^:]:%u", host, &port) != 2 || port > 65535) return false;
            into.options.host = host;
            into.options.port = static_cast<std::uint16_t>(port);
        } else {
            const char* name = words[i];
            const unsigned value = static_cast<unsigned>(std::strtoul(words[++i], nullptr, 10));
            if (!std::strcmp(name, "--matches")) into.matches = value;
            else if (!std::strcmp(name, "--period")) into.period = value;
            else if (!std::strcmp(name, "--fps")) into.fps = value;
            else return false;
        }
    }
    return into.period > 0 && into.fps > 0;
}

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Game {
public:
    explicit Game(const Arguments& arguments) : arguments_(arguments), loop_(arguments.options), pole_(0) {}

    bool over() const { return matches_ >= arguments_.matches; }

    void frame() {
        loop_.update(seconds());
        if (arguments_.wait) {
            loop_.wait(seconds());  // for the end of the last episode,
            loop_.wait(seconds());  // and for the start of this one
        }
        if (until_decision_ > 0) --until_decision_;
        if (until_decision_ == 0 && loop_.ready()) decide();
        if (arguments_.wait) loop_.wait(seconds());
        report();
        if (loop_.take_action(bytes_)) {
            right_ = ludus::RawReader(bytes_).i64() == 1;
            acting_ = true;
        }
        if (acting_) push();
    }

    void quit() { loop_.close(1000); }

private:
    void decide() {
        loop_.decide(out_.begin(loop_.ticked() ? reward_ : 0.0f).f32s(pole_.seen(), 4).body());
        reward_ = 0;
        until_decision_ = arguments_.period;
    }

    void push() {
        pole_.push(right_);
        reward_ += 1;
        ++frames_;
        if (frames_ < 500 && !pole_.fallen()) return;
        loop_.end_episode(out_.begin(reward_, pole_.fallen(), !pole_.fallen()).f32s(pole_.seen(), 4).body());
        ++matches_;
        std::printf("match %u: %u frames, %llu missed\n", matches_, frames_, static_cast<unsigned long long>(loop_.missed()));
        pole_ = CartPole(matches_);
        frames_ = until_decision_ = 0;
        reward_ = 0;
        acting_ = false;
    }

    void report() {
        const ludus::Reply& failure = loop_.failure();
        if (failure.error == reported_) return;
        reported_ = failure.error;
        if (failure.error == ludus::Error::None) std::printf("connected\n");
        else std::printf("warning: %d %s %s\n", failure.status, failure.message.c_str(), failure.hint.c_str());
    }

    const Arguments& arguments_;
    ludus::AgentLoop loop_;
    CartPole pole_;
    ludus::RawWriter out_;
    std::string bytes_;
    unsigned matches_ = 0, frames_ = 0, until_decision_ = 0;
    float reward_ = 0;
    bool right_ = false, acting_ = false;
    ludus::Error reported_ = ludus::Error::None;
};

}  // namespace

int main(int count, char** words) {
    Arguments arguments;
    if (!parse(count, words, arguments)) {
        std::fprintf(stderr, "frame_loop [--url http://HOST:PORT] [--matches N] [--period N] [--wait] [--fps N] [--frames]\n");
        return 2;
    }
    if (const char* token = std::getenv("LUDUS_TOKEN")) arguments.options.token = token;
    std::setvbuf(stdout, nullptr, _IOLBF, 4096);
    Game game(arguments);
    for (unsigned frame = 1; !game.over(); ++frame) {
        if (arguments.frames) std::printf("frame %u\n", frame);
        game.frame();
        if (arguments.frames) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        else if (!arguments.wait) std::this_thread::sleep_for(std::chrono::milliseconds(1000 / arguments.fps));
    }
    game.quit();
    return 0;
}
